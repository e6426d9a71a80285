"""How transfers between ranks are launched, by device and by what an expert is made of."""

import pytest
import torch

from equipoise.kernels import grouped_launch_triton, peers

EXPERT = 2048 * 4096
CUDA = torch.device("cuda", 0)


def moves(
    monkeypatch: pytest.MonkeyPatch,
    item_bytes: int,
    is_pull: bool,
    elements: int = EXPERT,
    address: int = 1 << 40,
    programs: int = 0,
    hip: str | None = None,
    multiprocessors: int = 132,
    shared: int = 232448,
) -> peers._Moves:
    monkeypatch.setattr(grouped_launch_triton, "num_multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(grouped_launch_triton, "has_descriptors", lambda device: True)
    monkeypatch.setattr(peers, "_shared_memory", lambda device: shared)
    monkeypatch.setattr(torch.version, "hip", hip)
    words = peers.words_of(elements * item_bytes, address)
    experts = peers._Experts(address, elements * item_bytes, None, words)
    return peers._Moves.of(CUDA, experts, item_bytes if is_pull else words.num_bytes, is_pull, programs)


def test_descriptors_keep_the_links_busy_with_a_few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert moves(monkeypatch, 2, is_pull=False) == (16, 4096, 4, 8, True)
    assert moves(monkeypatch, 2, is_pull=True) == (12, 4096, 4, 8, True)
    assert moves(monkeypatch, 4, is_pull=True) == (12, 4096, 4, 6, True), "two blocks of four bytes at a time"
    assert moves(monkeypatch, 2, is_pull=False, programs=40).programs == 40


def test_small_devices_keep_most_of_themselves_for_products(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_pull in (False, True):
        assert moves(monkeypatch, 2, is_pull, multiprocessors=20).programs == 4
        assert moves(monkeypatch, 2, is_pull, multiprocessors=4).programs == 1


def test_pointers_where_descriptors_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert moves(monkeypatch, 2, is_pull=False, shared=101376) == (16, 4096, 4, 5, True)
    assert moves(monkeypatch, 2, is_pull=True, shared=101376) == (24, 2048, 8, 4, False), "no room for blocks of both"
    assert moves(monkeypatch, 2, is_pull=True, elements=EXPERT + 64) == (24, 2048, 8, 4, False), "no whole blocks"
    assert not moves(monkeypatch, 2, is_pull=False, address=(1 << 40) + 8).described, (
        "addresses that 16 does not divide"
    )
    assert moves(monkeypatch, 2, is_pull=False, hip="7.0", multiprocessors=304) == (16, 2048, 8, 2, False)
    assert moves(monkeypatch, 2, is_pull=True, hip="7.0", multiprocessors=304) == (24, 2048, 8, 2, False)
