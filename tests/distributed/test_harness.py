"""The harness itself: results by rank, every rank's traceback, a deadline that leaves no process."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import pytest

from distributed.harness import RanksFailed, observe_ranks, run_ranks


@dataclass(frozen=True)
class Answer:
    rank: int
    threads: str
    extra: int


def answer(extra: int) -> Answer:
    return Answer(int(os.environ["RANK"]), os.environ["OMP_NUM_THREADS"], extra)


def join_and_sum() -> tuple[float, int]:
    import torch
    from torch import distributed as dist

    dist.init_process_group("gloo")
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.item(), torch.get_num_threads()


def raise_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("no such expert: 77")


def hang_on_rank_zero(child_pid_file: str) -> None:
    if os.environ["RANK"] == "0":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        with open(child_pid_file, "w") as f:
            f.write(str(child.pid))
        wait_for_ever()


def wait_for_ever() -> None:
    threading.Event().wait()


def die_by_signal() -> None:
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), 9)
    wait_for_ever()


def exit_with(code: int) -> None:
    print("last words")
    sys.exit(code)


@pytest.mark.parametrize("world_size", [1, 3])
def test_results_come_back_by_rank(world_size: int) -> None:
    results = run_ranks(answer, world_size, 5)
    assert results == [Answer(rank, "1", 5) for rank in range(world_size)]


def test_ranks_find_each_other_and_use_one_thread() -> None:
    assert run_ranks(join_and_sum, 2) == [(3.0, 1), (3.0, 1)]


def test_a_raising_rank_fails_with_its_traceback() -> None:
    with pytest.raises(RanksFailed, match="no such expert: 77") as failure:
        run_ranks(raise_on_rank_one, 2)
    assert "rank 0: exit code 0" in str(failure.value)
    assert "in raise_on_rank_one" in str(failure.value)


def test_the_deadline_shows_stacks_and_kills_ranks_with_their_children(tmp_path) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="did not end in time") as failure:
        run_ranks(hang_on_rank_zero, 2, str(tmp_path / "pid"), deadline_s=3)
    assert time.monotonic() - start < 10
    assert "wait_for_ever" in str(failure.value)
    child = (tmp_path / "pid").read_text()
    time.sleep(0.2)
    state = subprocess.run(["ps", "-o", "stat=", "-p", child], capture_output=True, text=True).stdout.strip()
    assert state[:1] in ("", "Z"), f"grandchild {child} still runs"


def test_observing_returns_how_each_rank_ended() -> None:
    killed, waiting = observe_ranks(die_by_signal, 2, wait_for=[0])
    assert killed.exit_code == -9
    assert waiting.exit_code is None
    assert not killed.ok
    assert not waiting.ok


def test_an_exit_code_is_kept_and_is_a_failure() -> None:
    (outcome,) = observe_ranks(exit_with, 1, 86)
    assert outcome.exit_code == 86
    assert "last words" in outcome.output
    with pytest.raises(RanksFailed, match="exit code 86"):
        run_ranks(exit_with, 1, 86)
