"""Small collectives of a trainer, packed into one message each."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh
"""A process group, or a mesh of one axis that stands for its group and outlives it when groups are parked."""


def live_group(group: Group) -> dist.ProcessGroup:
    """The group itself, or the present group of a mesh of one axis. Raises while the mesh is parked."""
    return group.get_group() if isinstance(group, DeviceMesh) else group


def group_device(group: dist.ProcessGroup) -> torch.device:
    """A device whose tensors the group carries: the CPU if it can, else the current accelerator device."""
    kinds = [torch.device(kind).type for kind in group._device_types]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def all_reduce_sum(values: Sequence[Tensor | float], group: dist.ProcessGroup) -> list[Tensor]:
    """Sums each value over the group's ranks, all in one all-reduce of float64.

    Tensors keep shape, dtype and device (all on one device, which the group carries); numbers become 0-d
    float64 tensors beside them. Integers are exact below 2**53. Nothing waits for the device.
    """
    if not values:
        return []
    device = next((v.device for v in values if isinstance(v, Tensor)), group_device(group))
    parts = [torch.as_tensor(v) if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float64) for v in values]
    packed = torch.cat([part.detach().to(device, torch.float64).reshape(-1) for part in parts])
    dist.all_reduce(packed, group=group)
    pieces = packed.split([part.numel() for part in parts])
    return [piece.reshape(part.shape).to(part.dtype) for piece, part in zip(pieces, parts)]
