"""What is concluded from the published statuses, and what is read from a launcher's variables."""

import os
from dataclasses import replace

import pytest
from torch import distributed as dist

from equipoise.distributed.status import Board, Finding, Status, explain, judge, shorten_ranks
from equipoise.distributed.watch import is_communication_error
from equipoise.distributed.world import Place
from equipoise.errors import ConfigError

ME = Status(0, "node0", 10, "place0", beat=5, sequence=7, operation="step 2: backward")
PEER = Status(3, "node1", 20, "place1", beat=5, sequence=7, operation="step 2: backward", seconds=1.5)
ALIVE = replace(PEER, beat=6)


def text(before: Status, after: Status) -> str:
    finding = judge(before, after, ME)
    return finding.text if finding else ""


def test_a_rank_in_the_same_operation_is_not_missing() -> None:
    assert judge(PEER, ALIVE, ME) is None


def test_a_beat_that_stands_still_means_no_sign_of_life() -> None:
    found = text(PEER, PEER)
    assert "rank 3 (host node1, pid 20)" in found
    assert "no sign of life" in found
    assert 'last seen in "step 2: backward" for 1.5 s' in found


@pytest.mark.parametrize(("sequence", "word"), [(6, "late"), (8, "elsewhere")])
def test_a_live_rank_in_another_operation(sequence: int, word: str) -> None:
    found = text(PEER, replace(ALIVE, sequence=sequence, operation="step 2: forward"))
    assert f"is {word}" in found
    assert "step 2: forward" in found


def test_a_failed_rank_shows_its_own_error() -> None:
    assert "DataError: no such file" in text(PEER, replace(ALIVE, state="failed", error="DataError: no such file"))


def test_causes_come_before_consequences() -> None:
    cause = judge(PEER, replace(ALIVE, state="failed", error="DataError: x"), ME)
    consequence = judge(PEER, replace(ALIVE, state="failed", error="RankFailure: y"), ME)
    silent = judge(PEER, PEER, ME)
    assert cause
    assert consequence
    assert silent
    assert silent.weight < cause.weight < consequence.weight


def test_a_process_of_the_same_host_that_is_gone_is_known_without_waiting() -> None:
    gone = 2**22 + 1  # above the largest process id
    assert "has ended" in text(PEER, replace(ALIVE, place=ME.place, pid=gone))
    assert judge(PEER, replace(ALIVE, place=ME.place, pid=os.getpid()), ME) is None


def test_long_lists_are_cut() -> None:
    findings = [Finding(0, f"rank {r} is gone") for r in range(100)]
    assert "and 92 more" in explain(findings, range(128))
    assert "all 4 ranks are alive" in explain([], range(4))


def test_in_a_large_group_one_rank_looks_and_all_tell_what_it_saw() -> None:
    store = dist.HashStore()
    seen = [
        Board(store).share(lambda rank=rank: f"  rank 7 is gone, says {rank}", f"rank {rank}", 1) for rank in range(3)
    ]
    assert seen == ["  rank 7 is gone, says 0\n  (seen by rank 0)"] * 3


@pytest.mark.parametrize(("ranks", "shown"), [([], ""), ([4], "4"), ([0, 1, 2, 5], "0-2, 5"), ([3, 1, 2], "1-3")])
def test_ranks_are_shortened(ranks: list[int], shown: str) -> None:
    assert shorten_ranks(ranks) == shown


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
            True,
        ),
        (RuntimeError("NCCL error in: ..., unhandled system error"), True),
        (RuntimeError("Timeout waiting for key: a/x after 1000 ms"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), False),
        (ValueError("gloo"), False),
    ],
)
def test_communication_errors_are_recognized(error: Exception, expected: bool) -> None:
    assert is_communication_error(error) is expected


LAUNCHER = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_launcher_variables_are_read() -> None:
    assert Place.from_environment(LAUNCHER) == Place(2, 4, 0, 2, "node0", 29500, agent_store=False)
    agent = {**LAUNCHER, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert Place.from_environment({**agent, "GROUP_WORLD_SIZE": "1"}) == Place(2, 4, 0, 2, "node0", 29500, True, "2")
    assert Place.from_environment({**agent, "GROUP_WORLD_SIZE": "2"}).attempt == "0"


def test_no_variables_mean_a_world_of_one() -> None:
    assert Place.from_environment({"PATH": "/bin"}) == Place()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} not set"):
        Place.from_environment({k: v for k, v in LAUNCHER.items() if k != name})


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "4"), ("RANK", "two"), ("WORLD_SIZE", "-1"), ("MASTER_PORT", "70000")]
)
def test_an_impossible_variable_is_named_with_its_value(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}='?{value}"):
        Place.from_environment({**LAUNCHER, name: value})
