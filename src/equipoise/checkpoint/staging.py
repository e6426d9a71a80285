"""Copies of tensors in host memory, so that training can change the originals while the copies are written."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from equipoise.accelerator import Accelerator, Event
from equipoise.accelerator.pinned import host_empty_like


@dataclass(frozen=True)
class Staged:
    """Host copies by key; to be read once `wait` has returned. Valid until the next `Staging.copy`."""

    tensors: Mapping[Any, torch.Tensor]
    copied: Event | None  # None: the copies were made when they were asked for

    def wait(self) -> None:
        """Makes this thread wait until the device has made the copies."""
        if self.copied is not None:
            self.copied.synchronize()


class Staging:
    """Buffers in host memory, kept from one copy to the next: pinned for tensors of a device, plain for others.

    The device copies in the order of its current stream, so that work enqueued later may change the originals and
    the host waits for nothing.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._buffers: dict[Hashable, torch.Tensor] = {}

    def copy(self, tensors: Mapping[Any, torch.Tensor]) -> Staged:
        """Copies tensors by key into buffers of their own. What the last copy gave is overwritten."""
        kept = self._buffers
        self._buffers = {}  # those of keys that are gone are freed
        device = False
        for key, tensor in tensors.items():
            on_device = tensor.device.type != "cpu"
            device |= on_device
            buffer = kept.get(key)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = host_empty_like(tensor)
            self._buffers[key] = buffer.copy_(tensor.detach(), non_blocking=on_device)
        copied = None
        if device:
            copied = self._accelerator.event()
            copied.record()
        return Staged(self._buffers, copied)
