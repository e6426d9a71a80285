"""Owned process groups: raw groups that torch accepts, made in one order, forgotten without a trace."""

import gc
import os

import pytest
import torch
from torch import distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from distributed.harness import run_ranks
from equipoise.accelerator import CPUAccelerator
from equipoise.distributed import join_world
from equipoise.errors import ConfigError


def resources() -> tuple[int, int, int]:
    """Live groups that torch knows, threads, and open files of this process."""
    gc.collect()
    groups = len(dist.distributed_c10d._world.pg_map)
    return groups, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def cycle(times: int) -> list[tuple[int, int, int]]:
    seen = []
    with join_world(CPUAccelerator(), 30) as world:
        for i in range(times):
            pair = world.groups.create_partition(f"pair{i}", [[0, 1]])
            alone = world.groups.create("alone", [0])
            other = world.groups.create_partition("each", [[0], [1]])
            assert (alone is None) == (world.rank == 1)
            x = torch.ones(1)
            dist.all_reduce(x, group=pair)
            assert x.item() == 2
            del pair, alone, other
            world.groups.destroy()
            seen.append(resources())
            assert world.groups.names() == []
    seen.append((len(dist.distributed_c10d._world.pg_map), 0, 0))
    return seen


def use_all() -> dict:
    return {"cycles": cycle(6), "torch": use_with_torch(), "wrong": make_wrongly()}


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    """What two ranks saw; starting them is the larger part of the time."""
    return run_ranks(use_all, 2)


def test_c30_destroying_and_creating_leaks_nothing(ranks) -> None:
    for seen in (r["cycles"] for r in ranks):
        assert len(set(seen[1:6])) == 1, seen  # the first cycle also destroys the group of all ranks
        assert seen[0][0] == 1, "only WORLD is left after destroy"
        assert seen[6][0] == 0, "nothing is left after the world"


def use_with_torch() -> tuple:
    with join_world(CPUAccelerator(), 30) as world:
        group = world.groups.create_partition("ep", [[0, 1]])
        assert world.groups.get("ep") is group
        assert world.groups.ranks("ep") == [0, 1]
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))
        tensor = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
        total = all_reduce(torch.ones(2), "sum", group)
        return tensor.full_tensor().tolist(), total.tolist(), world.groups.names(), group.group_desc


def test_meshes_dtensors_and_functional_collectives_accept_the_groups(ranks) -> None:
    for seen in (r["torch"] for r in ranks):
        assert seen == ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 2.0], ["all", "ep"], "ep")


def make_wrongly() -> list[str]:
    messages = []
    with join_world(CPUAccelerator(), 30) as world:
        groups = world.groups
        for make in (
            lambda: groups.create("all", [0]),
            lambda: groups.create("a", [1, 0]),
            lambda: groups.create("a", []),
            lambda: groups.create("a", [0, 2]),
            lambda: groups.create_partition("a", [[0, 1], [1]]),
            lambda: groups.create_partition("a", [[0]]),
            lambda: groups.get("absent"),
            # last: after it the ranks' calls are out of step
            lambda: groups.create("first" if world.rank == 0 else "second", [0, 1]),
        ):
            try:
                make()
                messages.append("")
            except ConfigError as e:
                messages.append(str(e))
    return messages


def test_wrong_calls_are_refused_before_anything_hangs(ranks) -> None:
    seen = [r["wrong"] for r in ranks]
    expected = (
        "exists already",
        "ascending",
        "at least one rank",
        "from 0 to 1",
        "disjoint",
        "ranks 1 are in none",
        "there are: all",
    )
    for messages in seen:
        for message, part in zip(messages, expected):
            assert part in message
        assert "different order on different ranks" in messages[-1]
