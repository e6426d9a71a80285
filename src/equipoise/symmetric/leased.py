"""Symmetric memory lent piece by piece, as tensors that give their piece back when they die."""

import ctypes
import math
import weakref
from collections.abc import Callable

import torch

from equipoise.kernels.streams import is_capturing
from equipoise.symmetric.space import SymmetricSpace


class LeasedMemory:
    """Equal pieces of one symmetric tensor, lent as tensors that give their piece back when the last view dies.

    Ranks need not lend the same piece: a rank tells its peers which one they are to write to.
    """

    def __init__(self, space: SymmetricSpace, num_pieces: int, piece_bytes: int, name: str) -> None:
        self.piece_bytes = max(-(-piece_bytes // 256), 1) * 256
        self.memory = space.allocate((num_pieces, self.piece_bytes), torch.uint8, name)
        self.num_pieces = num_pieces
        self._free = list(range(num_pieces))[::-1]
        self._captured: list[torch.Tensor] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The piece at whose begin a tensor lies; None: at none's."""
        number, offset = divmod(tensor.data_ptr() - self.memory.local.data_ptr(), self.piece_bytes)
        return number if 0 <= number < self.num_pieces and offset == 0 else None

    def lend(self) -> tuple[int, torch.Tensor]:
        """The piece's number and its bytes. `num_free` must not be 0.

        A piece lent while a CUDA graph is captured is never lent again: replays write to it.
        """
        index = self._free.pop()
        piece = self.memory.local[index]
        tensor = _owning_view(piece, lambda: self._free.append(index))
        if is_capturing(piece.device):
            self._captured.append(tensor)
        return index, tensor


def part(piece: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor in a piece, `offset` bytes behind its begin; of the same storage but no view of another
    tensor for autograd, which would keep the two alive together."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    empty = torch.empty(0, dtype=dtype, device=piece.device)
    return empty.set_(piece.untyped_storage(), offset // dtype.itemsize, shape, strides)


class _Piece:
    """Device memory with an owner, as other libraries would hand it over."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _owning_view(piece: torch.Tensor, on_free: Callable[[], None]) -> torch.Tensor:
    """The same bytes as a tensor of a storage of its own; `on_free` is called when that dies."""
    owner: object
    if piece.device.type == "cpu":
        owner = (ctypes.c_ubyte * piece.numel()).from_address(piece.data_ptr())
        view = torch.frombuffer(owner, dtype=torch.uint8)  # type: ignore[call-overload]
    else:
        owner = _Piece(piece.data_ptr(), piece.numel())
        view = torch.as_tensor(owner, device=piece.device)
        assert view.data_ptr() == piece.data_ptr()
    finalizer = weakref.finalize(owner, on_free)
    finalizer.atexit = False
    return view
