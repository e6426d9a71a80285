"""Joining and leaving: values, a world of one, ranks that never come, errors that do not hang the others."""

import os
import threading
import time
from functools import partial

import pytest
import torch
from torch import distributed as dist

from distributed.harness import observe_ranks, run_ranks
from equipoise.accelerator import CPUAccelerator
from equipoise.distributed import all_reduce_sum, gather_json, join_world, raise_together
from equipoise.distributed.agree import together
from equipoise.errors import ConfigError, DataError, RankFailure

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_twice() -> list[tuple]:
    seen = []
    for _ in range(2):
        with join_world(CPUAccelerator(), 30) as world:
            (total,) = all_reduce_sum([world.rank + 1], world.group)
            seen.append((world.rank, world.size, world.local_rank, str(world.device), total.item()))
        assert not dist.is_initialized()
        assert not [t for t in threading.enumerate() if t.name.startswith("equipoise")]
    return seen


def test_ranks_join_leave_and_join_again() -> None:
    assert run_ranks(join_twice, 2) == [[(r, 2, r, "cpu", 3.0)] * 2 for r in range(2)]


def join_alone() -> dict:
    seen: dict = {}
    os.environ.update(RANK="1", WORLD_SIZE="2")
    with pytest.raises(RankFailure) as failure, join_world(CPUAccelerator(), 20, rendezvous_s=1):
        pass
    seen["no rank 0"] = str(failure.value)
    for name in LAUNCHER:
        os.environ.pop(name, None)
    with join_world(CPUAccelerator(), 5) as world, world.operation("step 1"):
        raise_together(None, world)
        seen["alone"] = (world.rank, world.size, gather_json({"a": 1}, world))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ConfigError) as refusal, join_world(CPUAccelerator(), 5):
        pass
    seen["foreign"] = str(refusal.value)
    return seen


@pytest.fixture(scope="module")
def alone() -> dict:
    """What one process saw; starting it is the larger part of the time."""
    return run_ranks(join_alone, 1)[0]


def test_a_process_without_a_launcher_is_a_world_of_one(alone) -> None:
    assert alone["alone"] == (0, 1, [{"a": 1}])


def test_a_store_that_cannot_be_reached_is_named(alone) -> None:
    assert "did not reach the process of rank 0 at 127.0.0.1:" in alone["no rank 0"]
    assert "MASTER_ADDR" in alone["no rank 0"]


def test_a_foreign_world_is_refused(alone) -> None:
    assert "initialized already" in alone["foreign"]


def test_ranks_that_never_come_are_named_on_all_that_came() -> None:
    outcomes = observe_ranks(join_briefly, 2, deadline_s=30, env={"WORLD_SIZE": "4"})
    for outcome in outcomes:
        assert outcome.exit_code == 1
        assert "2 of 4 ranks did not arrive within 2 s: ranks 2-3" in outcome.traceback
        assert "arrived: rank 0 (host " in outcome.traceback


def join_briefly() -> None:
    with join_world(CPUAccelerator(), 20, rendezvous_s=2):
        pass


def fail_on(failing: int) -> None:
    with join_world(CPUAccelerator(), 20, beat_s=0.2) as world:
        with world.operation("step 7: data"):
            if world.rank == failing:
                raise DataError("shard-3 is unreadable")
        with world.operation("step 7: backward"):
            dist.all_reduce(torch.ones(10), group=world.group)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_of_one_rank_ends_all_and_is_told_to_the_others(failing: int) -> None:
    outcomes = observe_ranks(fail_on, 2, failing, deadline_s=40)
    assert [o.exit_code for o in outcomes] == [1, 1]
    assert max(o.seconds for o in outcomes) < 20
    trace = outcomes[1 - failing].traceback
    assert "RankFailure" in trace
    assert '"step 7: backward"' in trace
    assert f"rank {failing} (host " in trace
    assert 'in "step 7: data"' in trace
    assert "DataError: shard-3 is unreadable" in trace


def fail_with(error: Exception | None) -> None:
    if error is not None:
        raise error


def agree() -> dict:
    with join_world(CPUAccelerator(), 20) as world:
        seen: dict = {"values": gather_json(["x" * world.rank, None, 1.5, {"k": [world.rank]}], world)}
        raise_together(None, world)
        own = ValueError(f"bad shard {world.rank}") if world.rank in (1, 3) else None
        for scope in (world, world.group):
            try:
                raise_together(own, scope)
            except (ValueError, RankFailure) as e:
                seen["error"] = (type(e).__name__, str(e), getattr(e, "__notes__", []))
        data = DataError("no text" if world.rank < 3 else "no column") if world.rank else None
        try:
            together(partial(fail_with, data), world)
        except (DataError, RankFailure) as e:
            seen["data"] = (e is data, e.told_by, "\n".join([str(e), *getattr(e, "__notes__", [])]))
        seen["together"] = together(lambda: world.rank, world)
        pair = world.groups.create_partition("pair", [[0, 1], [2, 3]])
        seen["pair"] = gather_json(world.rank, pair)
        try:
            gather_json({1, 2} if world.rank == 2 else 0, world)
        except (TypeError, RankFailure) as e:
            seen["unwritable"] = f"{type(e).__name__}: {e}"
        a, b, c, d = all_reduce_sum(
            [torch.tensor([[1, 2], [3, 2**40]]), 0.5, torch.tensor(2.0), torch.empty(0)], world.group
        )
        seen["sums"] = (a.dtype, a.tolist(), b.item(), c.dtype, c.item(), d.shape)
        assert all_reduce_sum([], world.group) == []
        return seen


def test_agreement_between_four_ranks() -> None:
    start = time.monotonic()
    seen = run_ranks(agree, 4)
    assert time.monotonic() - start < 30
    for rank, s in enumerate(seen):
        assert s["values"] == [["x" * r, None, 1.5, {"k": [r]}] for r in range(4)]
        assert s["pair"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert s["sums"] == (
            torch.int64,
            [[4, 8], [12, 4 * 2**40]],
            2.0,
            torch.float32,
            8.0,
            torch.Size([0]),
        )
        kind, text, notes = s["error"]
        if rank in (1, 3):
            assert (kind, text) == ("ValueError", f"bad shard {rank}")
            assert f"rank {4 - rank}: ValueError: bad shard {4 - rank}" in notes[0]
            assert "RankFailure: ranks [2]" in s["unwritable"]
        else:
            assert kind == "RankFailure"
            assert "rank 1: ValueError: bad shard 1" in text
            assert "rank 3: ValueError: bad shard 3" in text
    assert "TypeError" in seen[2]["unwritable"]
    assert [s["together"] for s in seen] == [0, 1, 2, 3]
    assert [s["data"][:2] for s in seen] == [(rank > 0, 1) for rank in range(4)], "rank 1 is to tell it"
    texts = [s["data"][2] for s in seen]
    assert texts[0] == "3 of 4 ranks failed:\n  ranks 1-2: DataError: no text\n  rank 3: DataError: no column"
    for text in texts[1:3]:
        assert text == (
            "no text\n(the same on ranks 1-2 of 4)\nOther ranks of 4 failed otherwise:\n  rank 3: DataError: no column"
        )
    assert texts[3] == "no column\nOther ranks of 4 failed otherwise:\n  ranks 1-2: DataError: no text"
