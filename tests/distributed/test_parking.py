"""Parked process groups: training goes on unchanged, nothing is left alive, and using them meanwhile raises."""

import gc
import os
import signal
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from distributed.harness import observe_ranks, run_ranks
from distributed.parity import Case, differences, shared_store, toy_model, train_in_parallel, train_plainly
from distributed.rig import Rig, random_batch
from equipoise.accelerator import CPUAccelerator
from equipoise.distributed import join_world, park, unpark
from equipoise.distributed.mesh import ParallelConfig, build_meshes, derive_axes
from equipoise.distributed.world import World
from equipoise.errors import ConfigError, RankFailure

CYCLES = 20
EXPERTS = 8


def resources() -> tuple[int, int, int]:
    """Open files, threads and resident MiB of this process."""
    gc.collect()
    resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident


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


def make_rig(world: World, layout: ParallelConfig) -> Rig:
    meshes = build_meshes(derive_axes(layout, world.size, EXPERTS), world)
    config = toy_model(router_aux_loss_coef=0.01, router_aux_loss_scope="global_batch")
    return Rig(config, world, meshes, dispatcher=layout.dispatcher)


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


def train_and_park(layout: ParallelConfig, cycles: int) -> dict[str, Any]:
    found: dict[str, Any] = {"live": [], "parked": [], "alive": [], "losses": []}
    store = shared_store()
    with join_world(CPUAccelerator(), 60, store=store) as world:
        rig = make_rig(world, layout)
        found["plain losses"] = [train_step(rig, world, i) for i in range(cycles + 1)]
        expected = rig.parameters()
    del rig
    with join_world(CPUAccelerator(), 60, store=store) as world:
        rig = make_rig(world, layout)
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


@pytest.fixture(scope="module")
def parked() -> list[dict[str, Any]]:
    return run_ranks(train_and_park, 4, ParallelConfig(ep_size=2), CYCLES, deadline_s=120)


def test_training_with_parking_equals_training_without_bit_for_bit(parked) -> None:
    for rank in parked:
        assert rank["losses"] == rank["plain losses"]
        assert rank["equal"]


def test_replicas_and_the_other_dispatcher_train_on_as_well() -> None:
    layout = ParallelConfig(ep_size=2, replicate_size=2, dispatcher="all_gather")
    for rank in run_ranks(train_and_park, 4, layout, 2, deadline_s=120):
        assert rank["losses"] == rank["plain losses"]
        assert rank["equal"]
        assert rank["alive"] == [0, 0]


def test_nothing_of_the_groups_is_left_while_parked(parked) -> None:
    for rank in parked:
        assert rank["alive"] == [0] * CYCLES
        for live, parked_now in zip(rank["live"], rank["parked"]):
            assert parked_now[0] < live[0], "open files"
            assert parked_now[1] < live[1], "threads"


def test_cycles_leave_no_files_threads_or_memory_behind(parked) -> None:
    for rank in parked:
        for kind in ("live", "parked"):
            files, threads, resident = zip(*rank[kind][1:])
            assert len(set(files)) == 1, (kind, files)
            assert len(set(threads)) == 1, (kind, threads)
            assert resident[-1] - resident[1] <= 8, (kind, resident)


def test_using_anything_that_is_parked_raises(parked) -> None:
    for rank in parked:
        assert "worked" not in rank["use"].values(), rank["use"]
        for name in ("registry", "world", "create", "FSDP"):
            assert rank["use"][name].startswith("ConfigError: the process groups are parked: call unpark"), name
