"""Training through parked process groups: it goes on unchanged, nothing is left alive, use meanwhile raises."""

import os
import weakref
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce
from torch.distributed.tensor import Shard, distribute_tensor

from distributed.harness import run_ranks
from distributed.parity import Case, differences, shared_store, toy_model, train_in_parallel, train_plainly
from distributed.rig import Rig, random_batch
from distributed.test_backends import CPUOverMCCL
from equipoise.accelerator import CPUAccelerator
from equipoise.accelerator.host_memory import resident
from equipoise.balance.config import BalanceConfig
from equipoise.distributed import join_world, park, unpark
from equipoise.distributed.mesh import ParallelConfig, build_meshes, derive_axes
from equipoise.distributed.world import World

CYCLES = 20
EXPERTS = 8


def resources() -> tuple[int, int, int]:
    """Open files, threads and resident MiB of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident() // 2**20


def refusals(calls: dict[str, Any]) -> dict[str, str]:
    """What each call raised; "worked" where it did not."""
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "worked"
        except Exception as e:
            found[name] = f"{type(e).__name__}: {e}"
    return found


def working(found: dict[str, str]) -> list[str]:
    """Names of the calls that raised nothing."""
    return [name for name, text in found.items() if text == "worked"]


def make_rig(world: World, layout: ParallelConfig, **options: Any) -> Rig:
    meshes = build_meshes(derive_axes(layout, world.size, EXPERTS), world)
    config = toy_model(router_aux_loss_coef=0.01, router_aux_loss_scope="global_batch")
    return Rig(config, world, meshes, dispatcher=layout.dispatcher, **options)


def train_step(rig: Rig, world: World, index: int) -> tuple[float, float, float]:
    batches = [random_batch(world.size * index + rank, 1, 9 + rank) for rank in range(world.size)]
    result = rig.step([batches[world.rank]], sum(b.num_valid_tokens for b in batches))
    assert result is not None
    return result.loss, result.aux_loss, result.grad_norm


def use_parked(rig: Rig, world: World) -> dict[str, str]:
    """Every way to communicate through something that is parked."""
    experts, dense = rig.runner.layers[0].experts, rig.model.lm_head.weight
    batch = random_batch(0, 1, 9)
    x_TD, ids_TK, weights_TK = torch.ones(4, 32), torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
    expert_weight = next(experts.parameters())
    return refusals(
        {
            "registry": lambda: world.groups.get("ep"),
            "world": lambda: dist.all_reduce(torch.ones(1), group=world.group),
            "create": lambda: world.groups.create("new", [0]),
            "meshes": lambda: dist.all_reduce(torch.ones(1), group=rig.meshes.ep_group),
            "mesh over all ranks": lambda: distribute_tensor(torch.ones(8), rig.meshes.everyone, [Shard(0)]),
            "functional": lambda: functional_all_reduce(torch.ones(1), "sum", rig.meshes.ep).tolist(),
            "dense DTensor": lambda: dense.full_tensor(),
            "expert DTensor": lambda: expert_weight.full_tensor(),
            "FSDP": lambda: rig.model(batch.input_ids, batch.labels),
            "dispatcher": lambda: rig.runner.layers[0].dispatcher.dispatch(x_TD, ids_TK, weights_TK),
        }
    )


def train_and_park(store: dist.Store, layout: ParallelConfig, cycles: int, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"live": [], "parked": [], "alive": [], "losses": []}
    with join_world(CPUAccelerator(), 60, store=store) as world:
        rig = make_rig(world, layout, **options)
        found["plain losses"] = [train_step(rig, world, i) for i in range(cycles + 1)]
        expected = rig.parameters()
    del rig
    with join_world(CPUAccelerator(), 60, store=store) as world:
        rig = make_rig(world, layout, **options)
        found["losses"].append(train_step(rig, world, 0))
        for i in range(cycles):
            found["live"].append(resources())
            names = {g.group_name for g in dist.distributed_c10d._world.pg_map}
            old = [weakref.ref(group) for group in dist.distributed_c10d._world.pg_map]
            park(world, rig.model, rig.meshes)
            park(world, rig.model, rig.meshes)
            found["alive"].append(sum(group() is not None for group in old))
            found["parked"].append(resources())
            if i == 0:
                found["use"] = use_parked(rig, world)
                dist.barrier()  # the temporary WORLD works
            unpark(world)
            unpark(world)
            assert {g.group_name for g in dist.distributed_c10d._world.pg_map} == names
            found["losses"].append(train_step(rig, world, i + 1))
        found["live"].append(resources())
        found["equal"] = all(torch.equal(p, expected[name]) for name, p in rig.parameters().items())
    return found


def train_and_park_often() -> dict[str, Any]:
    return train_and_park(shared_store(), ParallelConfig(ep_size=2), CYCLES)


@pytest.fixture(scope="module")
def parked() -> list[dict[str, Any]]:
    return run_ranks(train_and_park_often, 4, deadline_s=120)


def test_training_with_parking_equals_training_without_bit_for_bit(parked) -> None:
    for rank in parked:
        assert rank["losses"] == rank["plain losses"]
        assert rank["equal"]


def train_in_other_ways() -> list[dict[str, Any]]:
    """With replicas of the model and the other dispatcher; with replicas of experts."""
    replicated = ParallelConfig(ep_size=2, replicate_size=2, dispatcher="all_gather")
    balanced = BalanceConfig(num_redundant_experts_per_rank=2, tolerance=0.0)
    store = shared_store()
    return [train_and_park(store, replicated, 2), train_and_park(store, ParallelConfig(ep_size=2), 2, balance=balanced)]


def test_replicas_the_other_dispatcher_and_the_balancer_train_on_as_well() -> None:
    for found in run_ranks(train_in_other_ways, 4, deadline_s=120):
        for way in found:
            assert way["losses"] == way["plain losses"]
            assert way["equal"]
            assert way["alive"] == [0, 0]


def test_nothing_of_the_groups_is_left_while_parked(parked) -> None:
    for rank in parked:
        assert rank["alive"] == [0] * CYCLES
        for live, parked_now in zip(rank["live"], rank["parked"]):
            assert parked_now[0] < live[0], "open files"
            assert parked_now[1] < live[1], "threads"


def test_cycles_leave_no_files_threads_or_memory_behind(parked) -> None:
    for rank in parked:
        for kind in ("live", "parked"):
            files, threads, memory = zip(*rank[kind][1:])
            assert len(set(files)) == 1, (kind, files)
            assert len(set(threads)) == 1, (kind, threads)
            assert memory[-1] - memory[1] <= 8, (kind, memory)


def test_using_anything_that_is_parked_raises(parked) -> None:
    for rank in parked:
        assert working(rank["use"]) == []
        for name in ("registry", "world", "create", "FSDP"):
            assert rank["use"][name].startswith("ConfigError: the process groups are parked: call unpark"), name


def train_over_mccl() -> dict[str, Any]:
    """Three steps over a transport that only a plug-in knows, against one process; then on through parking."""
    made = []

    def make_gloo(store, rank, size, timeout):  # type: ignore[no-untyped-def]
        made.append(size)
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("mccl", make_gloo, devices=["cpu"])
    store = shared_store()
    case = Case(toy_model(), ep=2)
    with join_world(CPUOverMCCL(), 60, store=store) as world:
        found = differences(train_in_parallel(case, world), train_plainly(case, world.size))
        backend = dist.get_backend(world.group)
    with join_world(CPUOverMCCL(), 60, store=store) as world:
        rig = make_rig(world, ParallelConfig(ep_size=2))
        train_step(rig, world, 0)
        asked = world.groups.create("asked", range(world.size), backend="nccl")
        backends = [backend, dist.get_backend(asked)]
        stale = asked
        made.clear()
        park(world, rig.model, rig.meshes)
        while_parked = [str(dist.get_backend()), len(made)]
        use = refusals({"stale": lambda: dist.all_reduce(torch.ones(1), group=stale)})
        unpark(world)
        backends.append(dist.get_backend(world.groups.get("asked")))
        train_step(rig, world, 1)
    return {"differences": found, "backends": backends, "parked": while_parked, "use": use, "made": len(made)}


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_transport_of_a_plug_in_carries_training_and_is_parked_like_any(world_size: int) -> None:
    for rank in run_ranks(train_over_mccl, world_size, deadline_s=120):
        assert {name: value for name, value in rank["differences"].items() if not value <= 1e-5} == {}
        assert rank["backends"] == ["cpu:mccl", "mccl", "mccl"]
        assert rank["parked"] == ["gloo", 0]
        assert working(rank["use"]) == []
        assert rank["made"] >= 6  # WORLD, all, ep, efsdp, shard, asked
