"""Which groups are one domain of symmetric memory: one host, a GPU for each rank, nobody with a reason against it."""

import pytest
import torch

from equipoise.symmetric.mapping import host_identity, symmetric_problem
from equipoise.symmetric.space import domain_problem

HERE, THERE = 11, 22


@pytest.mark.parametrize(
    ("found", "part"),
    [
        ([(0, HERE, 0), (0, HERE, 1)], None),
        ([(0, HERE, -1), (0, HERE, -1)], None),
        ([(0, HERE, 0), (0, HERE, 1), (0, THERE, 0), (0, THERE, 1)], "its 4 ranks are on 2 hosts"),
        ([(0, HERE, 0), (0, HERE, 0)], "several of its ranks use one GPU"),
        ([(0, HERE, 0), (1, HERE, 1)], "rank 1 of the group cannot"),
    ],
    ids=["one host", "one host without GPUs", "a group over two hosts", "two ranks on one GPU", "one rank cannot"],
)
def test_groups(found: list[tuple[int, int, int]], part: str | None) -> None:
    problem = domain_problem(found)
    assert problem is None if part is None else part in str(problem)


def test_a_group_over_hosts_is_told_what_to_choose() -> None:
    assert "ep_size of at most one host's GPUs" in str(domain_problem([(0, HERE, 0), (0, THERE, 0)]))


def test_what_a_rank_sees_alone() -> None:
    assert symmetric_problem(torch.device("cpu"), None) == "there is one rank"
    assert host_identity() == host_identity() != ""
