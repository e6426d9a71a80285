"""Whole documents into sequences of a fixed length."""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Packing:
    """Pieces of text, grouped into sequences. A piece is a document, or a part of one that is longer than a
    sequence.

    `start` int64 [pieces] and `length` int64 [pieces] (positions in the token array); sequence `i` holds the
    pieces `bounds[i]:bounds[i + 1]`, side by side; `bounds` int64 [sequences + 1].
    """

    start: np.ndarray
    length: np.ndarray
    bounds: np.ndarray


def pack_documents(document_starts: np.ndarray, sequence_length: int) -> Packing:
    """Pack documents by best fit, longest first, which leaves very little padding (Ding et al. 2024,
    2404.10830).

    `document_starts` int64 [documents + 1]: document d is `tokens[document_starts[d]:document_starts[d +
    1]]`, its last token being end of document. Each of its tokens but the last is an input, each but the
    first a label, so a document of n tokens takes n - 1 positions and nothing crosses its end. Longer ones
    are cut every `sequence_length` positions. The result depends on the lengths alone; sequences are in the
    order of their first piece.
    """
    lengths = np.diff(document_starts) - 1
    parts = np.maximum(-(-lengths // sequence_length), 0)
    part = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    start = np.repeat(document_starts[:-1], parts) + part * sequence_length
    length = np.minimum(np.repeat(lengths, parts) - part * sequence_length, sequence_length)
    sequence = _best_fit(length, sequence_length)
    order = np.argsort(sequence, kind="stable")
    counts = np.bincount(sequence) if len(sequence) else np.zeros(0, np.int64)
    return Packing(start[order], length[order], np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


def _best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Bin of each piece [pieces], bins numbered in the order of their first piece; ties go to the earliest
    bin."""
    bin_of = np.zeros(len(lengths), np.int64)
    open_bins: dict[int, list[int]] = {}  # room left -> bins, latest first
    rooms: list[int] = []  # the keys of open_bins, sorted
    num_bins = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[piece])
        place = bisect_left(rooms, size)
        if place < len(rooms):
            room = rooms[place]
            chosen = open_bins[room].pop()
            if not open_bins[room]:
                del open_bins[room], rooms[place]
        else:
            room, chosen = capacity, num_bins
            num_bins += 1
        bin_of[piece] = chosen
        left = room - size
        if left > 0:
            if left not in open_bins:
                open_bins[left] = []
                insort(rooms, left)
            open_bins[left].append(chosen)
    _, first = np.unique(bin_of, return_index=True)
    rank = np.empty(num_bins, np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(num_bins)
    return rank[bin_of] if num_bins else bin_of
