"""Checksums of messages: the same by any split, in any form, and different when bytes are."""

from itertools import pairwise

import pytest
import torch

from equipoise.kernels.checksum import FACTOR, SUMMAND, UNIT, add_checksum, checksum, copy_with_checksum, new_totals

SIZES = [0, 1, 3, 4, 63, 4 * UNIT - 1, 4 * UNIT, 8 * UNIT + 20, 600_003]


def some_bytes(number: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (number,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def by_the_definition(data: torch.Tensor, offset: int = 0) -> int:
    """In Python's integers, as the module says."""
    total = 0
    for place, byte in enumerate(data.tolist(), offset):
        unit, word = divmod(place // 4, UNIT)
        total += (byte << 8 * (place % 4)) * (2 * (word * (word * FACTOR + SUMMAND)) + 1) * (2 * unit + 1)
    return (total + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_sum_that_the_module_defines(size: int) -> None:
    assert int(checksum(some_bytes(size))) == by_the_definition(some_bytes(size))


@pytest.mark.parametrize("cuts", [[], [0], [16, 48], [1, 2, 3, 50], [4 * UNIT, 8 * UNIT - 3], [333, 100_001]])
def test_parts_add_up_in_any_order_wherever_they_are_cut(cuts: list[int]) -> None:
    data, total = some_bytes(8 * UNIT + 200_019), new_totals(1, "cpu")[0]
    edges = [0, *cuts, data.numel()]
    for first, last in reversed(list(pairwise(edges))):
        add_checksum(data[first:last], first, total)
    assert int(total) == int(checksum(data))


def test_it_notices_bytes_that_are_changed_moved_or_missing() -> None:
    data = some_bytes(600_003)
    data[-1] = 7
    whole = int(checksum(data))
    for place in (0, 4 * UNIT - 1, 4 * UNIT, 600_002):
        changed = data.clone()
        changed[place] ^= 1
        assert int(checksum(changed)) != whole
    swapped = data.clone()
    swapped[:4], swapped[4:8] = data[4:8], data[:4]
    assert int(checksum(swapped)) != whole
    unit = 4 * UNIT
    assert int(checksum(torch.cat([data[unit : 2 * unit], data[:unit], data[2 * unit :]]))) != whole
    assert int(checksum(data[:-1])) != whole
    stale = torch.cat([data[: 10 * unit], some_bytes(600_003 - 10 * unit, seed=1)])
    assert int(checksum(stale)) != whole


@pytest.mark.parametrize(
    ("source", "target"),
    [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("uint8", "uint8"), ("int64", "int64")],
)
@pytest.mark.parametrize("numel", [0, 1, 5, 2 * UNIT + 3])
def test_a_copy_casts_as_torch_does_and_sums_what_it_writes(source: str, target: str, numel: int) -> None:
    values = (torch.randn(numel + 1, generator=torch.Generator().manual_seed(0)) * 50).abs()
    values = values.to(getattr(torch, source))[1:]  # a view that starts at an odd place
    out, total = torch.zeros(numel, dtype=getattr(torch, target)), new_totals(1, "cpu")[0]
    copy_with_checksum(values, out, 48, total)
    assert torch.equal(out, values.to(out.dtype))
    assert int(total) == by_the_definition(out.view(torch.uint8), 48)


@pytest.mark.parametrize("offset", [0, 16, 4 * UNIT - 32, 12 * UNIT + 4096])
@pytest.mark.parametrize("num_words", [1, 7, UNIT, 2 * UNIT + 5])
def test_the_kernels_of_words_do_the_same(offset: int, num_words: int) -> None:
    pytest.importorskip("triton")
    from equipoise.kernels.checksum_triton import add_words

    words = some_bytes(4 * num_words).view(torch.int32).to(device())
    for target in (None, torch.zeros_like(words)):
        total = new_totals(1, device())[0]
        add_words(words, target, offset // 4, total)
        wanted = new_totals(1, "cpu")[0]
        add_checksum(words.cpu().view(torch.uint8), offset, wanted)
        assert int(total) == int(wanted)
        assert target is None or torch.equal(target, words)


@pytest.mark.parametrize("offset", [0, 16, 8 * UNIT - 32])
@pytest.mark.parametrize("numel", [1, 8, 4 * UNIT + 7])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernel_that_casts_does_the_same(dtype: torch.dtype, numel: int, offset: int) -> None:
    pytest.importorskip("triton")
    from equipoise.kernels.checksum_triton import cast_with_checksum

    values = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(device())
    if device() == "cpu":
        values = values.to(dtype).float()  # the interpreter cuts off where devices round
    target, total = torch.zeros(numel, dtype=dtype, device=device()), new_totals(1, device())[0]
    cast_with_checksum(values, target, offset // 4, total)
    assert torch.equal(target, values.to(dtype))
    wanted = new_totals(1, "cpu")[0]
    add_checksum(target.cpu().view(torch.uint8), offset, wanted)
    assert int(total) == int(wanted)


def device() -> str:
    """Where kernels run: in Triton's interpreter without a GPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"
