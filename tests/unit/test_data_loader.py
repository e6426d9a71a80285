"""The loader: one global order, whatever the number of ranks, resumed exactly; every rank always in step."""

import json
import random
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.data.dataset import IGNORED_LABEL, TokenSequence
from equipoise.data.loader import Batch, Loader, epoch_order, eval_batches
from equipoise.errors import ConfigError, DataError


class Numbered:
    """Sequence i consists of the number i, so that a batch shows which sequences it has."""

    has_documents = False
    pad_id = 10_000
    sequence_length = 3

    def __init__(self, num_sequences: int, fingerprint: str = "numbered") -> None:
        self.num_sequences = num_sequences
        self.fingerprint = fingerprint
        self.broken_after: int | None = None  # reads

    def sequence(self, index: int) -> TokenSequence:
        if self.broken_after is not None:
            if self.broken_after == 0:
                raise OSError("disk gone")
            self.broken_after -= 1
        return TokenSequence(np.full(3, index), np.full(3, index), None)

    def num_bytes(self, labels: np.ndarray) -> int:
        return 2 * len(labels)


def ids(batches: list[Batch]) -> list[int]:
    return [int(i) for batch in batches for i in batch.input_ids[:, 0]]


def steps(
    world_size: int,
    count: int,
    *,
    num_sequences: int = 10,
    global_batch: int = 4,
    micro: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    state: dict | None = None,
) -> list[list[int]]:
    """The sequences of each global step: those of all ranks, in order of rank and microbatch."""
    found: list[list[int]] = [[] for _ in range(count)]
    for rank in range(world_size):
        with Loader(Numbered(num_sequences), global_batch, micro, rank, world_size, seed, shuffle) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for step in range(count):
                batches = loader.next_step()
                assert [len(batch.input_ids) for batch in batches] == [micro] * (global_batch // world_size // micro)
                found[step] += ids(batches)
    return found


@settings(max_examples=40, deadline=None)
@given(
    num_sequences=st.integers(1, 23),
    per_rank=st.sampled_from([4, 8, 12]),
    micro=st.sampled_from([1, 2, 3]),
    before=st.integers(0, 6),
    seed=st.integers(0, 2**32),
    shuffle=st.booleans(),
)
def test_every_world_size_sees_the_same_steps_also_after_a_resume_at_another(
    num_sequences: int, per_rank: int, micro: int, before: int, seed: int, shuffle: bool
) -> None:
    """C44's data part: the next draws equal those of the run without a stop."""
    global_batch = per_rank * micro
    shared = {
        "num_sequences": num_sequences,
        "global_batch": global_batch,
        "micro": micro,
        "seed": seed,
        "shuffle": shuffle,
    }
    whole = steps(1, before + 3, **shared)
    for world_size in (2, 4):
        assert steps(world_size, before + 3, **shared) == whole
    with Loader(Numbered(num_sequences), global_batch, micro, 1, 2, seed, shuffle) as loader:
        for _ in range(before):
            loader.next_step()
        state = json.loads(json.dumps(loader.state_dict()))
    assert state["position"] == before * global_batch
    for world_size in (1, 2, 4):
        assert steps(world_size, 3, **shared, state=state) == whole[before:]


@pytest.mark.parametrize(("num_sequences", "global_batch"), [(1, 1), (1, 4), (5, 4), (7, 2), (8, 4), (3, 12)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_epoch_has_every_sequence_once_wherever_steps_cross_it(
    num_sequences: int, global_batch: int, shuffle: bool
) -> None:
    count = -(-3 * num_sequences // global_batch)
    found = steps(1, count, num_sequences=num_sequences, global_batch=global_batch, shuffle=shuffle)
    seen = [i for step in found for i in step]
    for epoch in range(3):
        part = seen[epoch * num_sequences : (epoch + 1) * num_sequences]
        assert sorted(part) == list(range(num_sequences))
        if not shuffle:
            assert part == list(range(num_sequences))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [tuple(epoch_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    assert orders[4] == tuple(epoch_order(50, 1, 1))


def test_the_order_never_changes_between_versions() -> None:
    """A saved position means something only with this exact order."""
    assert epoch_order(8, seed=1234, epoch=0).tolist() == [1, 6, 2, 0, 3, 5, 7, 4]


def test_ranks_with_little_data_make_the_same_number_of_steps() -> None:
    """C46 (d): five sequences, two ranks, ten steps."""
    counts = []
    for rank in range(2):
        with Loader(Numbered(5), 2, 1, rank, 2) as loader:
            counts.append(len([loader.next_step() for _ in range(10)]))
            assert loader.position == 20
            assert loader.epoch == 4.0
    assert counts == [10, 10]
    seen = Counter(i for step in steps(2, 10, num_sequences=5, global_batch=2) for i in step)
    assert seen == dict.fromkeys(range(5), 4)


def test_ranks_of_a_step_share_no_sequence_and_seeds_repeat() -> None:
    assert all(len(set(step)) == 4 for step in steps(4, 5, num_sequences=20))
    assert steps(2, 5, seed=1) == steps(2, 5, seed=1)
    assert steps(2, 5, seed=1) != steps(2, 5, seed=2)


def test_loading_data_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    steps(2, 3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert before[2] == random.getstate()


class Watched(Numbered):
    """Counts the reads, remembers the threads that did them, and lets a test wait for a number of them."""

    def __init__(self, num_sequences: int) -> None:
        super().__init__(num_sequences)
        self.threads: list[int] = []
        self._read = threading.Condition()

    def sequence(self, index: int) -> TokenSequence:
        with self._read:
            self.threads.append(threading.get_ident())
            self._read.notify_all()
        return super().sequence(index)

    def wait_for(self, count: int) -> None:
        with self._read:
            assert self._read.wait_for(lambda: len(self.threads) >= count, timeout=30)


def test_one_step_is_prepared_ahead_in_a_thread_and_the_position_knows_nothing_of_it() -> None:
    dataset = Watched(20)
    with Loader(dataset, 4, 2) as loader:
        assert loader.position == 0
        for step in range(1, 4):
            loader.next_step()
            dataset.wait_for(4 * (step + 1))
            assert loader.position == 4 * step == loader.state_dict()["position"]
    assert len(dataset.threads) == 16
    assert threading.get_ident() not in dataset.threads


def test_an_error_in_the_thread_reaches_the_caller_and_the_step_can_be_tried_again() -> None:
    expected = steps(1, 2)
    dataset = Numbered(10)
    with Loader(dataset, 4, 1) as loader:
        dataset.broken_after = 4  # the first step can be read, what is prepared behind it can not
        assert ids(loader.next_step()) == expected[0]
        for _ in range(2):
            with pytest.raises(OSError, match="disk gone"):
                loader.next_step()
            assert loader.position == 4
        dataset.broken_after = None
        assert ids(loader.next_step()) == expected[1]


def test_loading_a_position_forgets_what_was_prepared() -> None:
    expected = steps(1, 3)
    with Loader(Numbered(10), 4, 1) as loader:
        start = loader.state_dict()
        for _ in range(2):
            assert [ids(loader.next_step()) for _ in range(3)] == expected
            loader.load_state_dict(start)


def test_closing_twice_is_harmless_and_leaves_no_thread() -> None:
    before = threading.active_count()
    loader = Loader(Numbered(10), 4, 1)
    loader.next_step()
    loader.close()
    loader.close()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("dataset", "settings", "name"),
    [
        (Numbered(10, "other"), {}, "fingerprint 'other'"),
        (Numbered(11), {}, "num_sequences 11"),
        (Numbered(10), {"global_batch_size": 8}, "global_batch_size 8"),
        (Numbered(10), {"seed": 9}, "seed 9"),
        (Numbered(10), {"shuffle": False}, "shuffle False"),
    ],
    ids=["data", "size", "batch", "seed", "shuffle"],
)
def test_a_position_of_other_data_or_order_is_refused_by_name(dataset: Numbered, settings: dict, name: str) -> None:
    with Loader(dataset, **{"global_batch_size": 4, "micro_batch_size": 1, **settings}) as other:
        other.next_step()
        state = other.state_dict()
    with Loader(Numbered(10), 4, 1) as loader:
        with pytest.raises(DataError, match=name):
            loader.load_state_dict(state)
        assert loader.position == 0


@pytest.mark.parametrize(("change", "message"), [({"position": -1}, "-1"), ({"position": None}, "None")])
def test_a_damaged_position_is_refused(change: dict, message: str) -> None:
    with Loader(Numbered(10), 4, 1) as loader:
        with pytest.raises(DataError, match=message):
            loader.load_state_dict({**loader.state_dict(), **change})
        with pytest.raises(DataError, match="lacks fingerprint, "):
            loader.load_state_dict({"position": 3})


@pytest.mark.parametrize(
    ("global_batch", "micro", "rank", "world_size"),
    [(6, 1, 0, 4), (8, 3, 0, 2), (0, 1, 0, 1), (4, 0, 0, 1), (4, 1, 2, 2)],
)
def test_sizes_that_do_not_divide_are_refused(global_batch: int, micro: int, rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError):
        Loader(Numbered(10), global_batch, micro, rank, world_size)


def test_a_batch_counts_its_valid_tokens_and_bytes_and_moves_whole() -> None:
    with Loader(Numbered(10), 2, 2) as loader:
        [batch] = loader.next_step()
    assert (batch.num_valid_tokens, batch.num_bytes) == (6, 12)
    moved = batch.to("meta")
    assert moved.input_ids.is_meta
    assert moved.labels.is_meta
    assert moved.num_valid_tokens == 6


@pytest.mark.parametrize("asked", [1, 3, 7, 10, 50, None])
@pytest.mark.parametrize("micro", [1, 3])
def test_evaluation_has_the_same_sequences_and_equal_batch_counts_for_every_world_size(
    asked: int | None, micro: int
) -> None:
    dataset = Numbered(10)
    expected = min(asked or 10, 10)
    found = set()
    for world_size in (1, 2, 4):
        shares = [list(eval_batches(dataset, asked, micro, rank, world_size)) for rank in range(world_size)]
        assert len({len(share) for share in shares}) == 1
        batches = [batch for share in shares for batch in share]
        assert {tuple(batch.labels.shape) for batch in batches} == {(micro, 3)}
        real = sorted(int(row[0]) for batch in batches for row in batch.labels if row[0] != IGNORED_LABEL)
        assert len(real) == len(set(real)) == expected
        assert sum(batch.num_valid_tokens for batch in batches) == 3 * expected
        assert sum(batch.num_bytes for batch in batches) == 6 * expected
        found.add(tuple(real))
    assert len(found) == 1


def test_a_few_evaluation_sequences_are_spread_over_the_data() -> None:
    assert ids(list(eval_batches(Numbered(100), 4, 1))) == [0, 25, 50, 75]
