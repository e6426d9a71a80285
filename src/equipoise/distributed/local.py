"""This rank's part of a tensor."""

import torch
from torch.distributed.tensor import DTensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The object itself that a DTensor holds on this rank, outside of the graph; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
