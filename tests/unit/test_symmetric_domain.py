"""Which groups are one domain of symmetric memory: one host, a GPU for each rank, nobody with a reason against it. And
groups of several domains: sizes, and the order of rows from the own domain and from others."""

import pytest
import torch

from equipoise.balance_config import BalanceConfig
from equipoise.dispatch.domains import merged_places
from equipoise.distributed.mesh import ParallelConfig, derive_axes
from equipoise.errors import ConfigError
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


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize(("first", "size"), [(0, 2), (2, 2), (4, 2), (0, 6), (3, 1)])
def test_merged_rows_are_sorted_by_expert_and_source(first: int, size: int, spare: int) -> None:
    generator = torch.Generator().manual_seed(first + size)
    for largest in (0, 1, 5):
        counts_PL = torch.randint(0, largest + 1, (6, 3), generator=generator)
        pairs = [(e, p) for e in range(3) for p in range(6) for _ in range(int(counts_PL[p, e]))]
        is_near = [first <= p < first + size for _, p in pairs]
        near = [pair for pair, here in zip(pairs, is_near) if here]
        far = [pair for pair, here in zip(pairs, is_near) if not here]
        near_L, far_PL = counts_PL[first : first + size].sum(0), counts_PL.clone()
        far_PL[first : first + size] = 0
        places = merged_places(near_L, far_PL, first, len(near) + spare, len(far))
        merged: list[object] = [None] * (len(pairs) + spare)
        for place, pair in zip([*places.near_C.tolist(), *places.far_F.tolist()], [*near, *["nobody"] * spare, *far]):
            merged[place] = pair
        assert merged == [*pairs, *["nobody"] * spare]


def test_domains_divide_the_group() -> None:
    assert derive_axes(ParallelConfig(ep_size=8), 16, 32).domain == 8
    assert derive_axes(ParallelConfig(ep_size=8, domain_size=4), 16, 32).domain == 4
    with pytest.raises(ConfigError, match=r"domain_size is 3, which does not divide parallel.ep_size 8: .*1, 2, 4, 8"):
        derive_axes(ParallelConfig(ep_size=8, domain_size=3), 16, 32)


@pytest.mark.parametrize(
    ("settings", "dispatcher", "domain", "uses"),
    [
        ({}, "symmetric", 8, True),
        ({"planner": "eplb"}, "symmetric", 8, False),
        ({}, "all_to_all", 8, False),
        ({}, "symmetric", 4, True),
        ({"planner": "eplb"}, "symmetric", 4, True),
        ({}, "all_to_all", 4, False),
        ({"transport": "collective"}, "symmetric", 4, False),
        ({"transport": "symmetric"}, "all_to_all", 4, True),
    ],
)
def test_what_is_used_of_symmetric_memory_for_replicas(settings, dispatcher, domain, uses) -> None:
    assert BalanceConfig(**settings).uses_space(dispatcher, 8, domain) == uses
