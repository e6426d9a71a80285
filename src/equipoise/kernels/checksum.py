"""A checksum of a message that a copy computes on its way, and the copy.

The byte at place p counts `byte << 8 * (p % 4)` times an odd weight of word p // 4; the checksum is the sum modulo
2^32. So parts of a message add to it in any order, each where it is read anyway, a word that changes always changes
it, and bytes that are moved, missing or of another message do with near certainty. Bytes of 0, such as padding, add
nothing. It is no protection against somebody who wants to deceive.

The plain forms here run anywhere in bounded scratch memory; on accelerators one Triton kernel copies, casts and adds.
"""

from functools import lru_cache

import torch

from equipoise.kernels.triton_support import use_triton

UNIT = 1 << 13
"""Words whose weights differ by a polynomial of their place; units differ by a factor."""
FACTOR, SUMMAND = 0x1E3779B2, 0x2545F491
"""Weight of word w of unit u: (2 * (w * (w * FACTOR + SUMMAND)) + 1) * (2 * u + 1), modulo 2^32."""
_UNITS_AT_ONCE = 512  # of a plain checksum: 16 MiB


def new_totals(num_messages: int, device: torch.device | str) -> torch.Tensor:
    """int32 [num_messages] of 0: to each its message's parts are added."""
    return torch.zeros(num_messages, dtype=torch.int32, device=device)


def checksum(data: torch.Tensor) -> torch.Tensor:
    """Of a whole message, uint8 [bytes]; an int32 scalar on its device."""
    (total,) = new_totals(1, data.device)
    add_checksum(data, 0, total)
    return total


def add_checksum(data: torch.Tensor, offset: int, total: torch.Tensor) -> None:
    """Adds the share of the bytes from `offset` of a message to `total`, one of `new_totals`; `data` is uint8 and
    contiguous."""
    if _takes_triton(data, data, offset):
        from equipoise.kernels.checksum_triton import add_words

        whole = data.numel() // 4 * 4
        add_words(data[:whole].view(torch.int32), None, offset // 4, total)
        data, offset = data[whole:], offset + whole
    _add_plain(data, offset, total)


def copy_with_checksum(source: torch.Tensor, target: torch.Tensor, offset: int, total: torch.Tensor) -> None:
    """Copies one flat tensor into another, casting, and adds the share of the target's bytes at `offset` of a message.

    Puts work on the current stream and does not wait.
    """
    if not source.numel():
        return
    same = source.dtype == target.dtype
    if _takes_triton(source, target, offset):
        from equipoise.kernels import checksum_triton

        if same:
            source, target = source.view(torch.uint8), target.view(torch.uint8)
            whole = target.numel() // 4 * 4
            words, place = source[:whole].view(torch.int32), target[:whole].view(torch.int32)
            checksum_triton.add_words(words, place, offset // 4, total)
            source, target, offset = source[whole:], target[whole:], offset + whole
        elif source.dtype == torch.float32 and target.dtype in (torch.bfloat16, torch.float16):
            checksum_triton.cast_with_checksum(source, target, offset // 4, total)
            return
    target.copy_(source)
    _add_plain(target.view(torch.uint8), offset, total)


def _takes_triton(source: torch.Tensor, target: torch.Tensor, offset: int) -> bool:
    """Words of both have to lie at addresses of words, and the message's part at one of four words."""
    return use_triton(target.device) and not (offset % 16 or source.data_ptr() % 4 or target.data_ptr() % 4)


def _add_plain(data: torch.Tensor, offset: int, total: torch.Tensor) -> None:
    """`add_checksum` in torch's operations."""
    if not data.numel():
        return
    before, behind = offset % 4, -(offset + data.numel()) % 4
    if before or behind or data.storage_offset() % 4:
        data = torch.nn.functional.pad(data, (before, behind))
        if data.storage_offset() % 4:
            data = data.clone()
    words, place, weights = data.view(torch.int32), offset // 4, _weights(data.device)
    first = min(words.numel(), -place % UNIT)
    whole = (words.numel() - first) // UNIT
    _add_part(words[:first], place, weights, total)
    for start in range(0, whole, _UNITS_AT_ONCE):
        number = min(whole - start, _UNITS_AT_ONCE)
        begin = first + start * UNIT
        sums = (words[begin : begin + number * UNIT].view(number, UNIT) * weights).sum(1, dtype=torch.int32)
        units = torch.arange(number, dtype=torch.int32, device=data.device) + (place + begin) // UNIT
        total += (sums * (2 * units + 1)).sum(dtype=torch.int32)
    end = first + whole * UNIT
    _add_part(words[end:], place + end, weights, total)


def _add_part(words: torch.Tensor, place: int, weights: torch.Tensor, total: torch.Tensor) -> None:
    """Words of one unit."""
    if words.numel():
        begin = place % UNIT
        part = (words * weights[begin : begin + words.numel()]).sum(dtype=torch.int32)
        total += part * (2 * (place // UNIT) + 1)


@lru_cache
def _weights(device: torch.device) -> torch.Tensor:
    """Of the words of unit 0, int32 [UNIT]."""
    word = torch.arange(UNIT, dtype=torch.int32, device=device)
    return word * (word * FACTOR + SUMMAND) * 2 + 1
