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
    if tensor.device.type != "cpu" and not _refused:
        try:
            return torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=True)
        except RuntimeError as error:
            _refused.append(str(error))
            logger.warning("host memory cannot be pinned, so copies from and to the device are slower: %s", error)
    return torch.empty_like(tensor, device="cpu", requires_grad=False)
