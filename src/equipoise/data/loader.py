"""Batches of the global sequence order, split over ranks and microbatches, with a position that resumes
exactly.

Shape suffixes: B sequences of a microbatch, S positions of a sequence.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
import torch

from equipoise.accelerator.pinned import to_device
from equipoise.data.dataset import IGNORED_LABEL, TokenDataset
from equipoise.errors import ConfigError, DataError


@dataclass(frozen=True)
class Batch:
    """One microbatch.

    `input_ids`, `labels`: int64 [B, S]; labels are the next tokens, or -100 where there is no loss. With
    packed documents, else None: `position_ids` int64 [B, S], from 0 in each document, and `document_ids`
    int32 [B, S], which number the documents of a sequence from 0 and are -1 on padding. `num_valid_tokens`
    counts the labels that are not -100, `num_bytes` the UTF-8 bytes of text that these stand for.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None
    document_ids: torch.Tensor | None
    num_valid_tokens: int
    num_bytes: int

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch with its tensors on `device`. The host does not wait for the device's work."""
        return replace(
            self,
            input_ids=to_device(self.input_ids, device),
            labels=to_device(self.labels, device),
            position_ids=None if self.position_ids is None else to_device(self.position_ids, device),
            document_ids=None if self.document_ids is None else to_device(self.document_ids, device),
        )


def refuse_other_order(state: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raises `DataError` where `state` of a loader was saved with other values than `present`, which may be a part of
    those that a loader has."""
    if missing := sorted({"position", *present} - state.keys()):
        raise DataError(
            f"the saved data position lacks {', '.join(missing)}; it is not one of this loader. Choose another run "
            "folder with --out"
        )
    different = [f"{key} {state[key]!r} (now {value!r})" for key, value in present.items() if state[key] != value]
    if different:
        raise DataError(
            f"the saved data position belongs to other data or another order: {', '.join(different)}. Resume with the "
            "same data, tokenizer, seed and global batch, or start a new run from the weights alone"
        )


class Loader:
    """Endless steps of training data for one rank.

    Position p, the number of sequences that all ranks together have consumed, decides what comes next:
    sequence `order(p // N)[p % N]` of the N, where `order(e)` is a permutation drawn from (seed, e). A step
    takes `global_batch_size` positions; rank r takes the r-th of `world_size` equal slices and divides it in
    order into microbatches. So every rank makes every step, an epoch visits each sequence once, and neither
    the data nor its order depends on the number of ranks. One step is prepared ahead in a thread; the
    position knows nothing of it.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Batch sizes in sequences. Raises `ConfigError` when they do not divide."""
        if min(global_batch_size, micro_batch_size, world_size) < 1 or not 0 <= rank < world_size:
            raise ConfigError(
                f"global batch {global_batch_size}, microbatch {micro_batch_size} and number of ranks "
                f"{world_size} must be at least 1, and the rank, {rank}, below the number of ranks"
            )
        if global_batch_size % (world_size * micro_batch_size):
            raise ConfigError(
                f"train.global_batch_size {global_batch_size} is not a multiple of "
                f"{world_size * micro_batch_size} = {world_size} ranks x train.micro_batch_size "
                f"{micro_batch_size}; change one of them"
            )
        if dataset.num_sequences < 1:
            raise DataError("the dataset has no sequences; give more text or a shorter train.sequence_length")
        self._dataset = dataset
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._rank, self._world_size = rank, world_size
        self._seed, self._shuffle = seed, shuffle
        self._position = 0
        self._orders: dict[int, np.ndarray] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._pending: Future[list[Batch]] | None = None

    @property
    def position(self) -> int:
        """Sequences that all ranks together have been given."""
        return self._position

    @property
    def epoch(self) -> float:
        """Passes over the data so far, with its fraction."""
        return self._position / self._dataset.num_sequences

    def next_step(self) -> list[Batch]:
        """This rank's microbatches of the next step, on the CPU.

        An error in preparing them is raised here, with the position as before; calling again tries again.
        """
        current = self._pending or self._worker.submit(self._build, self._position)
        self._pending = None
        batches = current.result()
        self._position += self._global_batch_size
        self._pending = self._worker.submit(self._build, self._position)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """What resumes this position, ready for JSON: the same on every rank and for any number of ranks."""
        return {
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "global_batch_size": self._global_batch_size,
            "num_sequences": self._dataset.num_sequences,
            "sequence_length": self._dataset.sequence_length,
            "fingerprint": self._dataset.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises `DataError`, changing nothing, when it is of other data or
        of another seed, order or global batch, from which the position would mean something else."""
        present = self.state_dict()
        del present["position"]
        refuse_other_order(state, present)
        position = state["position"]
        if not isinstance(position, int) or position < 0:
            raise DataError(f"the saved data position is {position!r}; expected a number of sequences from 0")
        self._forget_pending()
        self._position = position

    def close(self) -> None:
        """Stop the thread. Harmless when repeated; no step can follow."""
        self._forget_pending()
        self._worker.shutdown()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forget_pending(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None

    def _build(self, position: int) -> list[Batch]:
        size = self._global_batch_size // self._world_size
        first = position + self._rank * size
        indices = [self._index(at) for at in range(first, first + size)]
        step = self._micro_batch_size
        return [_collate(self._dataset, indices[i : i + step]) for i in range(0, size, step)]

    def _index(self, position: int) -> int:
        epoch, at = divmod(position, self._dataset.num_sequences)
        if not self._shuffle:
            return at
        if epoch not in self._orders:
            while len(self._orders) > 1:  # a step needs two only where it crosses from one epoch to the next
                del self._orders[min(self._orders)]
            self._orders[epoch] = epoch_order(self._dataset.num_sequences, self._seed, epoch)
        return int(self._orders[epoch][at])


def epoch_order(num_sequences: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of the sequences, int64 [num_sequences].

    It sorts raw Philox words, whose values numpy guarantees for all versions, as it does not for
    `permutation`.
    """
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(num_sequences)
    return np.argsort(keys, kind="stable")


def eval_batches(
    dataset: TokenDataset,
    num_sequences: int | None,
    micro_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Batch]:
    """This rank's share of `num_sequences` sequences, spread evenly over the dataset (None, or more than it
    has: all).

    The sequences are the same for every number of ranks, and each rank gets the same number of batches, all
    of `micro_batch_size` sequences: missing ones are padding whose labels are all ignored, so collectives
    stay in step.
    """
    count = dataset.num_sequences
    if num_sequences is not None:
        count = min(count, num_sequences)
    indices: list[int | None] = [k * dataset.num_sequences // count for k in range(count)]
    stride = world_size * micro_batch_size
    indices += [None] * (-count % stride)
    for begin in range(rank * micro_batch_size, len(indices), stride):
        yield _collate(dataset, indices[begin : begin + micro_batch_size])


def _collate(dataset: TokenDataset, indices: Sequence[int | None]) -> Batch:
    """The sequences of these numbers as one batch; None gives a sequence of padding."""
    shape = (len(indices), dataset.sequence_length)
    inputs_BS = np.full(shape, dataset.pad_id, np.int64)
    labels_BS = np.full(shape, IGNORED_LABEL, np.int64)
    positions_BS = np.tile(np.arange(shape[1]), (shape[0], 1))
    documents_BS = np.full(shape, -1, np.int32)
    for row, index in enumerate(indices):
        if index is None:
            continue
        inputs_BS[row], labels_BS[row], cu_seqlens = dataset.sequence(index)
        if cu_seqlens is not None:
            lengths = np.diff(cu_seqlens, append=shape[1])  # the last is the padding, often 0 long
            positions_BS[row] -= np.repeat(cu_seqlens, lengths)
            documents_BS[row, : cu_seqlens[-1]] = np.repeat(np.arange(len(lengths) - 1), lengths[:-1])
    valid = labels_BS != IGNORED_LABEL
    return Batch(
        input_ids=torch.from_numpy(inputs_BS),
        labels=torch.from_numpy(labels_BS),
        position_ids=torch.from_numpy(positions_BS) if dataset.has_documents else None,
        document_ids=torch.from_numpy(documents_BS) if dataset.has_documents else None,
        num_valid_tokens=int(valid.sum()),
        num_bytes=dataset.num_bytes(labels_BS[valid]),
    )
