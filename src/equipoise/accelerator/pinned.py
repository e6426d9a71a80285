"""Host memory that a device can copy from and to without the host's help."""

import logging
from collections.abc import Sequence

import torch

logger = logging.getLogger(__name__)

_refused: list[str] = []  # why memory could not be pinned; said once


def host_empty(shape: Sequence[int], dtype: torch.dtype, pin: bool) -> torch.Tensor:
    """An uninitialised CPU tensor; with `pin` in page-locked memory, so that copies from and to a device run beside
    its work. Where the platform refuses to pin, a warning says so once, and memory is plain from then on."""
    if pin and not _refused:
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            _refused.append(str(error))
            logger.warning("host memory cannot be pinned, so copies from and to the device are slower: %s", error)
    return torch.empty(shape, dtype=dtype)
