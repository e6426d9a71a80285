"""Symmetric memory lent piece by piece, as tensors: a piece is free when the last tensor in it has died."""

import ctypes
import math
from typing import NamedTuple

import torch

from equipoise.kernels.streams import is_capturing
from equipoise.symmetric.space import SymmetricSpace


class Part(NamedTuple):
    """A contiguous tensor in a piece, `offset` bytes behind its begin."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class LeasedMemory:
    """Equal pieces of one symmetric tensor, each a storage of its own.

    Ranks need not lend the same piece: a rank tells its peers which one they are to write to.
    """

    def __init__(self, space: SymmetricSpace, num_pieces: int, piece_bytes: int, name: str) -> None:
        self.piece_bytes = max(-(-piece_bytes // 256), 1) * 256
        self.memory = space.allocate((num_pieces, self.piece_bytes), torch.uint8, name)
        self.num_pieces = num_pieces
        self._address = self.memory.local.data_ptr()
        self._pieces = [_own_storage(piece) for piece in self.memory.local]
        self._storages = [piece.untyped_storage()._cdata for piece in self._pieces]
        self._known: list[dict[Part, torch.Tensor]] = [{} for _ in self._pieces]
        self._uses = [_num_uses(storage) for storage in self._storages]
        self._captured: list[torch.Tensor] = []

    @property
    def num_free(self) -> int:
        return len(self.free(self.num_pieces))

    def free(self, most: int) -> list[int]:
        """Numbers of free pieces, at most so many."""
        found: list[int] = []
        for number, (storage, own) in enumerate(zip(self._storages, self._uses)):
            if _num_uses(storage) == own:
                found.append(number)
                if len(found) == most:
                    break
        return found

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The piece at whose begin a tensor lies; None: at none's."""
        number, offset = divmod(tensor.data_ptr() - self._address, self.piece_bytes)
        return number if 0 <= number < self.num_pieces and offset == 0 else None

    def lend(self, number: int, part: Part) -> torch.Tensor:
        """A tensor in a piece; `number` is free, or lent in part by now.

        It is of the same storage as others in the piece but no view of one for autograd, which would keep the two alive
        together. A piece lent while a CUDA graph is captured is never lent again: replays write to it.
        """
        known = self._known[number].get(part)
        if known is None:
            strides = [math.prod(part.shape[dim + 1 :]) for dim in range(len(part.shape))]
            storage = self._pieces[number].untyped_storage()
            with torch.inference_mode(False):  # or no later backward could keep it
                known = torch.empty(0, dtype=part.dtype, device=self._pieces[number].device)
                known.set_(storage, part.offset // part.dtype.itemsize, part.shape, strides)
            self._known[number][part] = known
            self._uses[number] += 1
        lent = known.data
        if is_capturing(lent.device):
            self._captured.append(lent.data)
        return lent


def _num_uses(storage: int) -> int:
    """Tensors of a storage, and whatever else refers to it. Torch's CUDA graph trees ask the same."""
    return torch._C._storage_Use_Count(storage)


class _Piece:
    """Device memory, as other libraries would hand it over."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _own_storage(piece: torch.Tensor) -> torch.Tensor:
    """The same bytes as a tensor of a storage of its own. `piece` stays alive by other means."""
    if piece.device.type == "cpu":
        memory = (ctypes.c_ubyte * piece.numel()).from_address(piece.data_ptr())
        return torch.frombuffer(memory, dtype=torch.uint8)  # type: ignore[call-overload]
    view = torch.as_tensor(_Piece(piece.data_ptr(), piece.numel()), device=piece.device)
    assert view.data_ptr() == piece.data_ptr()
    return view
