"""Triton forms of `kernels/checksum.py`: each byte is read once, and written once where it is copied.

A program takes one unit of the message, so a word's weight depends on its place in the program and the unit's factor is
applied to one sum. The sums of programs are added by integer atomics: exact in any order.
"""

import torch
import triton
import triton.language as tl

from equipoise.kernels.checksum import FACTOR, SUMMAND, UNIT

_NUM_WARPS = 8


@triton.jit
def _add_share(share, unit, total_ptr):
    tl.atomic_add(total_ptr, tl.sum(share, 0) * (2 * unit + 1), sem="relaxed")


@triton.jit
def words_kernel(
    source_ptr,
    target_ptr,
    total_ptr,
    first_unit,
    quads,
    num_words,
    STORE: tl.constexpr,
    UNIT: tl.constexpr,
    FACTOR: tl.constexpr,
    SUMMAND: tl.constexpr,
):
    """Words of the message from word 4 * quads of unit `first_unit`."""
    number = tl.program_id(0)
    word = tl.arange(0, UNIT)
    place = number.to(tl.int64) * UNIT - quads * 4 + word
    mask = (place >= 0) & (place < num_words)
    value = tl.load(source_ptr + place, mask=mask, other=0)
    if STORE:
        tl.store(target_ptr + place, value, mask=mask)
    weight = word * (word * FACTOR + SUMMAND) * 2 + 1
    _add_share(value * weight, first_unit + number, total_ptr)


@triton.jit
def cast_kernel(
    source_ptr,
    target_ptr,
    total_ptr,
    first_unit,
    quads,
    num_values,
    UNIT: tl.constexpr,
    FACTOR: tl.constexpr,
    SUMMAND: tl.constexpr,
):
    """Two values of the target are a word, the first its lower half."""
    number = tl.program_id(0)
    half = tl.arange(0, 2 * UNIT)
    place = number.to(tl.int64) * (2 * UNIT) - quads * 8 + half
    mask = (place >= 0) & (place < num_values)
    value = tl.load(source_ptr + place, mask=mask, other=0.0).to(target_ptr.dtype.element_ty)
    tl.store(target_ptr + place, value, mask=mask)
    word = half // 2
    weight = (word * (word * FACTOR + SUMMAND) * 2 + 1) * (1 + half % 2 * 65535)
    bits = value.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    _add_share(bits * weight, first_unit + number, total_ptr)


def add_words(source: torch.Tensor, target: torch.Tensor | None, place: int, total: torch.Tensor) -> None:
    """Copies int32 words, unless there is no target, and adds their share; `place`: of the first in the message, a
    multiple of 4."""
    num_words = source.numel()
    if num_words:
        store = target is not None
        words_kernel[_grid(place, num_words)](
            source, target if store else source, total, place // UNIT, place % UNIT // 4, num_words,
            STORE=store, UNIT=UNIT, FACTOR=FACTOR, SUMMAND=SUMMAND, num_warps=_NUM_WARPS,
        )  # fmt: skip


def cast_with_checksum(source: torch.Tensor, target: torch.Tensor, place: int, total: torch.Tensor) -> None:
    """Casts FP32 values to 16 bits and adds the share of the result; `place` as for `add_words`."""
    num_values = target.numel()
    cast_kernel[_grid(place, -(-num_values // 2))](
        source, target, total, place // UNIT, place % UNIT // 4, num_values,
        UNIT=UNIT, FACTOR=FACTOR, SUMMAND=SUMMAND, num_warps=2 * _NUM_WARPS,
    )  # fmt: skip


def _grid(place: int, num_words: int) -> tuple[int]:
    """One program for each unit that the words touch."""
    return (-(-(place % UNIT + num_words) // UNIT),)
