"""Host memory that a device can copy from and to without the host's help."""

import logging

import torch

logger = logging.getLogger(__name__)

_refused: list[str] = []  # why memory could not be pinned; said once


def host_empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised CPU tensor of the same shape, strides and dtype.

    For a tensor of a device it lies in page-locked memory, so that copies from and to the device run beside its work.
    Where the platform refuses to pin, a warning says so once, and memory is plain from then on.
    """
    return _host_empty(tensor, tensor.device)


def _host_empty(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same for copies from and to `device`."""
    if device.type != "cpu" and not _refused:
        try:
            return torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=True)
        except RuntimeError as error:
            _refused.append(str(error))
            logger.warning("host memory cannot be pinned, so copies from and to the device are slower: %s", error)
    return torch.empty_like(tensor, device="cpu", requires_grad=False)


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A copy on `device`, or the tensor itself if it is there. Of a CPU tensor it is taken through page-locked memory:
    a copy from plain memory would make the host wait for all work that the device has been given."""
    device = torch.device(device)
    if tensor.device == device or tensor.device.type != "cpu" or device.type == "cpu" or tensor.is_pinned():
        return tensor.to(device, non_blocking=True)
    pinned = _host_empty(tensor, device)
    return pinned.copy_(tensor).to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU that holds its values once the device has come so far; the host does not wait. A CPU tensor is
    returned as it is."""
    if tensor.device.type == "cpu":
        return tensor
    return host_empty_like(tensor).copy_(tensor, non_blocking=True)
