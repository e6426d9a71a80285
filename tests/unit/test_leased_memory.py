"""Pieces of shared memory are lent again when, and only when, no tensor of them is left."""

import gc
import weakref

import pytest
import torch

from equipoise.symmetric import leased
from equipoise.symmetric.leased import LeasedMemory, Part
from equipoise.symmetric.space import SymmetricTensor


class Space:
    """Allocates memory that nobody shares."""

    def allocate(self, shape, dtype, name):
        return SymmetricTensor(torch.zeros(*shape, dtype=dtype), torch.zeros(1, dtype=torch.int64))


ROWS, RECORDS = Part(0, (5, 8), torch.float16), Part(256, (7,), torch.int32)


@pytest.fixture
def memory() -> LeasedMemory:
    return LeasedMemory(Space(), 3, 300, "rows")  # type: ignore[arg-type]


def test_parts_lie_where_they_should(memory: LeasedMemory) -> None:
    assert memory.piece_bytes == 512
    rows, records = memory.lend(1, ROWS), memory.lend(1, RECORDS)
    begin = memory.memory.local.data_ptr() + 512
    assert (rows.data_ptr(), records.data_ptr()) == (begin, begin + 256)
    assert (rows.shape, rows.dtype, records.shape, records.dtype) == ((5, 8), torch.float16, (7,), torch.int32)
    assert rows.is_contiguous()
    rows.fill_(2)
    assert memory.memory.local[1, :80].view(torch.float16).eq(2).all()
    assert memory.number_of(rows) == 1
    assert memory.number_of(records) is None, "not at the piece's begin"
    assert memory.number_of(torch.zeros(5, 8)) is None


def test_a_piece_is_free_when_the_last_tensor_in_it_has_died(memory: LeasedMemory) -> None:
    assert memory.free(9) == [0, 1, 2]
    for _ in range(3):  # the tensors that are kept for the next time count for nobody
        rows, records = memory.lend(0, ROWS), memory.lend(0, RECORDS)
        assert memory.free(9) == [1, 2]
        view = rows[1:3].view(-1)
        del rows
        assert memory.free(9) == [1, 2], "records and a view are left"
        del records
        assert memory.free(9) == [1, 2], "a view is left"
        del view
        assert memory.free(9) == [0, 1, 2]
    assert memory.num_free == 3
    assert memory.free(1) == [0]


def test_what_a_backward_needs_keeps_its_piece(memory: LeasedMemory) -> None:
    factor = torch.ones(8, dtype=torch.float16, requires_grad=True)
    y = memory.lend(2, ROWS) * factor
    assert memory.free(9) == [0, 1]
    y.sum().backward()
    assert memory.free(9) == [0, 1, 2]


def test_changes_in_place_of_one_part_do_not_spoil_what_is_saved_of_another(memory: LeasedMemory) -> None:
    factor = torch.ones(8, dtype=torch.float16, requires_grad=True)
    other = Part(256, (2, 8), torch.float16)
    y = memory.lend(0, ROWS) * factor
    memory.lend(0, other).add_(1)
    y.sum().backward()
    assert factor.grad is not None


def test_a_piece_that_was_lent_in_a_graph_is_never_free_again(memory: LeasedMemory, monkeypatch) -> None:
    monkeypatch.setattr(leased, "is_capturing", lambda device: True)
    memory.lend(1, ROWS)
    monkeypatch.setattr(leased, "is_capturing", lambda device: False)
    memory.lend(0, ROWS)
    assert memory.free(9) == [0, 2]


def test_a_lent_tensor_dies_with_its_last_reference(memory: LeasedMemory) -> None:
    rows = memory.lend(0, ROWS)
    died = weakref.ref(rows)
    del rows
    gc.collect()
    assert died() is None
