"""The world over an accelerator's own transport (two devices needed): groups, clean ends, ranks that die or stop."""

import os
import signal
import time

import pytest
import torch
from torch import distributed as dist

from distributed.harness import observe_ranks, run_ranks
from equipoise.accelerator import get_accelerator
from equipoise.distributed import all_reduce_sum, gather_json, join_world, raise_together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
TIMEOUT_S = 6.0


def use_groups() -> list[int]:
    accelerator = get_accelerator()
    open_files = []
    with join_world(accelerator, 60) as world:
        assert world.device == accelerator.device(world.rank)
        for i in range(4):
            group = world.groups.create_partition(f"pair{i}", [[0, 1]])
            x = torch.full((1000,), world.rank + 1.0, device=world.device)
            dist.all_reduce(x, group=group)
            total, counts = all_reduce_sum([1.5, torch.ones(2, dtype=torch.int64, device=world.device)], group)
            assert (x[0].item(), total.item(), counts.tolist()) == (3.0, 3.0, [2, 2])
            assert gather_json({"rank": world.rank}, group) == [{"rank": 0}, {"rank": 1}]
            raise_together(None, group)
            del group
            world.groups.destroy()
            open_files.append(len(os.listdir("/proc/self/fd")))
    return open_files


def test_groups_carry_host_and_device_tensors_and_leak_no_files() -> None:
    for open_files in run_ranks(use_groups, 2, deadline_s=120):
        assert len(set(open_files[1:])) == 1, open_files


def lose_rank_one(how: str) -> None:
    with join_world(get_accelerator(), TIMEOUT_S, rendezvous_s=60) as world:
        x = torch.ones(2**20, device=world.device)
        with world.operation("step 1: backward", world.group, deadline_s=60):
            dist.all_reduce(x, group=world.group)
            world.accelerator.synchronize()
        if world.rank == 1:
            with world.operation("step 2: forward"):
                time.sleep(0.5)
                if how == "raise":
                    raise ValueError("bad shard")
                os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
        with world.operation("step 2: backward", world.group):
            dist.all_reduce(x, group=world.group)
            world.accelerator.synchronize()


@pytest.mark.parametrize("how", ["kill", "stop", "raise"])
def test_a_lost_rank_ends_the_other_which_names_it(how: str) -> None:
    survivor, _ = observe_ranks(lose_rank_one, 2, how, deadline_s=120, wait_for=[0])
    assert survivor.exit_code not in (0, None)
    assert "rank 1 (host " in survivor.traceback + survivor.output
