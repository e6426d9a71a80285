"""Parked groups one by one: stale handles, what comes back and what does not, late and dead ranks."""

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from distributed.harness import observe_ranks, run_ranks
from distributed.test_parking import refusals, working
from equipoise.accelerator import CPUAccelerator
from equipoise.distributed import join_world, park, unpark
from equipoise.distributed.world import World

TIMEOUT_S = 2.0
PAIRS = [[0, 1], [2, 3]]


def total(group: dist.ProcessGroup) -> float:
    """The number of ranks that an all-reduce of ones reaches."""
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    return x.item()


def keep_a_handle(world: World) -> dict[str, Any]:
    """W1: a kept handle of a parked group must not act on WORLD, nor go on by itself."""
    pair = world.groups.create_partition("kept", PAIRS)
    before = total(pair)
    park(world)
    x = torch.ones(2)
    use = refusals(
        {
            "all_reduce": lambda: dist.all_reduce(x, group=pair),
            "broadcast": lambda: dist.broadcast(x, 0, group=pair),
            "all_gather": lambda: dist.all_gather_into_tensor(torch.empty(4), x, group=pair),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty(1), x, group=pair),
            "all_to_all": lambda: dist.all_to_all_single(torch.empty(2), x, group=pair),
            "barrier": lambda: dist.barrier(group=pair),
            "send": lambda: dist.send(x, world.rank ^ 1, group=pair),
            "bare": lambda: pair.allreduce([x]).wait(),
            "functional": lambda: functional_all_reduce(x, "sum", pair).tolist(),
        }
    )
    temporary = total(dist.group.WORLD)
    unpark(world)
    after_wake = refusals({"all_reduce": lambda: dist.all_reduce(x, group=pair)})
    return {"use": use, "totals": [before, temporary, total(world.groups.get("kept"))], "after wake": after_wake}


def use_with_torch_again(world: World) -> dict[str, Any]:
    """W3: rebuilt groups are torch's own, and the meshes made before parking are theirs again."""
    mesh = DeviceMesh.from_group(world.groups.create_partition("mesh", PAIRS), "cpu", mesh_dim_names=("mesh",))
    tensor = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    park(world, mesh)
    unpark(world)
    group = world.groups.get("mesh")
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), process_group=group)
    model(torch.full((1, 2), float(dist.get_rank(group)))).sum().backward()
    return {
        "DTensor": tensor.full_tensor().tolist(),
        "functional": functional_all_reduce(torch.ones(1), "sum", group).item(),
        "new mesh": DeviceMesh.from_group(group, "cpu").size(),
        "DDP": model.module.weight.grad.tolist(),
        "same": mesh.get_group() is group,
        "described": group.group_desc,
    }


def destroy_by_hand(world: World) -> dict[str, Any]:
    """W4: a group that somebody destroyed with torch's own function is not made again; others keep their names."""
    halves = world.groups.create_partition("halves", PAIRS)
    later = world.groups.create("later", range(4))
    assert later is not None
    name = later.group_name
    if world.rank < 2:
        dist.destroy_process_group(halves)
    del halves, later
    park(world)
    unpark(world)
    found = {"names": world.groups.names(), "member": world.groups.is_member("halves")}
    later = world.groups.get("later")
    found |= {"same name": later.group_name == name, "total": total(later)}
    found["new"] = total(world.groups.create_partition("new", PAIRS))
    return found


def keep_settings(world: World) -> list[Any]:
    """Timeouts and options after each of three cycles."""
    asked = []

    def options() -> Any:
        asked.append(dist.ProcessGroupGloo._Options())  # Gloo takes none: that they are asked for is what counts
        return asked[-1]

    world.groups.create("slow", range(4), timeout_s=77, options=options)
    found = []
    for _ in range(3):
        park(world)
        unpark(world)
        backend: Any = world.groups.get("slow")._get_backend(torch.device("cpu"))
        found.append((backend.options._timeout.total_seconds(), len(asked)))
    return found


def be_late(world: World) -> dict[str, float]:
    """Rank 3 rebuilds a second later than the others: nobody returns before it has."""
    park(world)
    build = world.groups._build
    if world.rank == 3:

        def slowly(spec):  # type: ignore[no-untyped-def]
            time.sleep(1.0 if spec.name == "all" else 0)
            build(spec)

        world.groups._build = slowly  # type: ignore[method-assign]
    start = time.monotonic()
    unpark(world)
    seconds = time.monotonic() - start
    world.groups._build = build  # type: ignore[method-assign]
    return {"seconds": seconds, "total": total(world.group)}


def lose_the_world(world: World) -> dict[str, float]:
    """Somebody else has destroyed everything before parking: it is built again."""
    dist.barrier(group=world.group)
    dist.destroy_process_group()
    park(world)
    park(world)
    dist.barrier()
    unpark(world)
    return {"total": total(world.group)}


def bring_a_foreign_group(world: World) -> str:
    """A group that was not made through the registry, on one rank only."""
    if world.rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    return refusals({"park": lambda: park(world)})["park"]


def fail_in_a_collective(world: World) -> dict[str, Any]:
    """W9: an error inside an operation comes out as it is, or as the cause."""
    found: dict[str, Any] = {}
    try:
        with world.operation("wrong shapes", world.group):
            dist.all_gather_into_tensor(torch.empty(3), torch.ones(2), group=world.group)
    except Exception as e:
        found["wrong shapes"] = (f"{type(e).__name__}: {e}", str(e.__cause__))
    park(world)
    try:
        with world.operation("step 3", None):
            dist.all_reduce(torch.ones(1), group=world.group)
    except Exception as e:
        found["parked"] = f"{type(e).__name__}: {e}"
    unpark(world)
    return found


SCENARIOS = (
    keep_a_handle,
    use_with_torch_again,
    destroy_by_hand,
    keep_settings,
    be_late,
    fail_in_a_collective,
    lose_the_world,
    bring_a_foreign_group,  # last: it leaves a group behind
)


def run_all() -> dict[str, Any]:
    with join_world(CPUAccelerator(), 30) as world:
        return {scenario.__name__: scenario(world) for scenario in SCENARIOS}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(run_all, 4, deadline_s=90)


def test_w1_a_kept_handle_of_a_parked_group_raises_and_never_acts_on_the_world(ranks) -> None:
    for seen in (r["keep_a_handle"] for r in ranks):
        assert seen["totals"] == [2, 4, 2]
        assert working(seen["use"]) == []
        assert working(seen["after wake"]) == []


def test_w3_rebuilt_groups_are_accepted_by_all_of_torch(ranks) -> None:
    for seen in (r["use_with_torch_again"] for r in ranks):
        assert seen == {
            "DTensor": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
            "functional": 2.0,
            "new mesh": 2,
            "DDP": [[0.5, 0.5]],
            "same": True,
            "described": "mesh",
        }


def test_w4_a_group_destroyed_by_hand_is_not_rebuilt_and_nothing_hangs(ranks) -> None:
    for rank, seen in enumerate(r["destroy_by_hand"] for r in ranks):
        assert seen["member"] == (rank >= 2), "only the other pair's group is left"
        assert {"later", "all"} <= set(seen["names"])
        assert (seen["same name"], seen["total"], seen["new"]) == (True, 4, 2)


def test_w9_errors_are_reported_as_they_are_without_a_device(ranks) -> None:
    for seen in (r["fail_in_a_collective"] for r in ranks):
        message, cause = seen["wrong shapes"]
        assert message.startswith('RankFailure: "wrong shapes" on rank')
        assert "ProcessGroupGloo::allgather" in cause
        assert cause.splitlines()[0] in message
        assert seen["parked"].startswith("ConfigError: the process groups are parked")


def test_timeouts_and_options_survive_every_cycle(ranks) -> None:
    for seen in (r["keep_settings"] for r in ranks):
        assert seen == [(77.0, 2), (77.0, 3), (77.0, 4)]


def test_no_rank_goes_on_before_all_groups_of_all_ranks_are_rebuilt(ranks) -> None:
    for seen in (r["be_late"] for r in ranks):
        assert seen["seconds"] >= 0.9
        assert seen["total"] == 4


def test_parking_after_somebody_destroyed_everything_rebuilds_it(ranks) -> None:
    for seen in (r["lose_the_world"] for r in ranks):
        assert seen == {"total": 4}


def test_groups_that_could_not_come_back_are_refused_on_every_rank(ranks) -> None:
    for seen in (r["bring_a_foreign_group"] for r in ranks):
        assert seen.startswith("ConfigError: rank 1 has process groups of ranks ['1'] that were not made through")


def lose_rank_two(when: str) -> None:
    with join_world(CPUAccelerator(), TIMEOUT_S, rendezvous_s=40) as world:
        if world.rank == 2 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        park(world)
        if world.rank == 2 and when == "while parked":
            os.kill(os.getpid(), signal.SIGKILL)
        if world.rank == 2 and when == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        unpark(world)


@pytest.mark.parametrize(
    ("when", "operation", "reason"),
    [
        ("before", "park process groups", "its process has ended"),
        ("while parked", "unpark process groups", "its process has ended"),
        ("stopped", "unpark process groups", "is stopped"),
    ],
)
def test_a_rank_that_is_lost_is_named(when: str, operation: str, reason: str) -> None:
    outcomes = observe_ranks(lose_rank_two, 3, when, deadline_s=60, wait_for=[0, 1])
    for outcome in outcomes[:2]:
        report = outcome.traceback + outcome.output
        assert outcome.exit_code not in (0, None)
        assert f'"{operation}" on rank {outcome.rank} of 3' in report
        assert "rank 2 (host " in report
        assert reason in report
