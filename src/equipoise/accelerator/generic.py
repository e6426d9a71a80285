"""Any other device type that PyTorch knows (Intel's, Huawei's, Apple's, ...), through `torch.accelerator`.

Such a device has no file here, so what it can do is found by asking torch, and what torch does not offer for
it is named: by `supports`, by `limits`, and in a warning when it is chosen.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed import Backend

from equipoise.accelerator.base import Capability, MemoryStats, checked_index
from equipoise.accelerator.registry import Registration
from equipoise.accelerator.torch_accelerator import TorchAccelerator, TorchEvent
from equipoise.errors import ConfigError

#: Types that are never chosen without a request, with the reason.
ONLY_ON_REQUEST = {"mps": "collectives between processes are not known to work on it"}


class GenericAccelerator(TorchAccelerator):
    """The device type that torch was built for or that a plug-in brought, called by its torch name."""

    def __init__(self, device_type: str) -> None:
        self.name = self.device_type = device_type

    def limits(self) -> tuple[str, ...]:
        """What this device cannot do here, in words; empty when nothing is known to be missing."""
        found = []
        if Backend.default_device_backend_map.get(self.device_type) is None:
            found.append("no transport between processes is registered for it")
        if not hasattr(self._optional_namespace(), "get_rng_state"):
            found.append("the state of its generator cannot be saved")
        if self.memory().total == 0:
            found.append("its memory is not reported")
        return tuple(found)

    def _optional_namespace(self) -> Any:
        return getattr(torch, self.device_type, None)

    def current_device_index(self) -> int:
        """Local ordinal of the current device."""
        return int(torch.accelerator.current_device_index())

    def set_device(self, index: int) -> None:
        """Make local ordinal `index` current."""
        count = self.device_count()
        if checked_index(index, self.device_type) >= count:
            raise ConfigError(f"{self.device_type} device {index} was asked for, but this process sees {count}")
        torch.accelerator.set_device_index(index)

    def device_count(self) -> int:
        """Devices that this process sees."""
        return int(torch.accelerator.device_count())

    def device_name(self, index: int | None = None) -> str:
        """The hardware's own name where the namespace tells it, else the device type."""
        name = getattr(self._optional_namespace(), "get_device_name", None)
        return self.device_type if name is None else str(name(index))

    def synchronize(self) -> None:
        """Make the host wait for all work of the current device."""
        torch.accelerator.synchronize()

    def event(self, timing: bool = False) -> TorchEvent:
        """A new `TorchEvent` over `torch.Event`."""
        return TorchEvent(torch.Event(self.device_type, enable_timing=timing))

    def new_stream(self) -> Any:
        """A new `torch.Stream`."""
        return torch.Stream(device=self.device())

    def current_stream(self) -> Any:
        """The stream that work is put on now."""
        return torch.accelerator.current_stream()

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside this context, work is put on `stream`."""
        return nullcontext() if stream is None else stream

    def memory(self) -> MemoryStats:
        """What `torch.accelerator` reports; 0 for what it does not know of this type."""
        free, total = _ask("get_memory_info", (0, 0))
        return MemoryStats(
            allocated=_ask("memory_allocated", 0),
            peak_allocated=_ask("max_memory_allocated", 0),
            reserved=_ask("memory_reserved", 0),
            free=int(free),
            total=int(total),
        )

    def reset_peak_memory(self) -> None:
        """Restart the allocator's peaks, where it keeps any."""
        _ask("reset_peak_memory_stats", None)

    def empty_cache(self) -> None:
        """Give cached, unused memory back, where there is a cache."""
        _ask("empty_cache", None)

    def ipc_collect(self) -> None:
        """Release shared memory, where the namespace can."""
        collect = getattr(self._optional_namespace(), "ipc_collect", None)
        if collect is not None:
            collect()

    def manual_seed(self, seed: int) -> None:
        """Seed the generators of the host and of every device."""
        torch.manual_seed(seed)

    def rng_state(self) -> torch.Tensor:
        """State of the device's generator; `ConfigError` where the namespace has none to give."""
        return self._rng("get_rng_state")()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore the device's generator; `ConfigError` where the namespace cannot."""
        self._rng("set_rng_state")(state)

    def _rng(self, name: str) -> Any:
        function = getattr(self._optional_namespace(), name, None)
        if function is None:
            raise ConfigError(
                f"torch.{self.device_type} has no {name}, so the generator's state can be neither saved nor restored"
            )
        return function

    def communication_backend(self) -> str:
        """The transport that torch's registry names for this type; `ConfigError` when it names none."""
        name = Backend.default_device_backend_map.get(self.device_type)
        if name is None:
            raise ConfigError(
                f"no transport is registered for {self.device_type} tensors; the vendor's package "
                f"should call torch.distributed.Backend.register_backend(..., devices=[{self.device_type!r}])"
            )
        return str(name)

    def _supports(self, capability: str) -> Capability:
        if capability == "streams":
            return Capability(True, "torch.Stream")
        if self._optional_namespace() is None and capability not in ("profiler", "triton"):
            return Capability(False, f"torch has no namespace torch.{self.device_type}")
        return super()._supports(capability)


def _ask(function: str, default: Any) -> Any:
    """`torch.accelerator.<function>()`, or `default` where torch lacks it or the device does not answer."""
    try:
        return getattr(torch.accelerator, function)()
    except (AttributeError, RuntimeError, NotImplementedError):
        return default


def registration(claimed: set[str]) -> Registration | None:
    """The backend for torch's own accelerator, unless its type is one of `claimed` by other backends."""
    try:
        device = torch.accelerator.current_accelerator()
    except RuntimeError:  # a device type was named, but no runtime stands behind it
        return None
    if device is None or device.type in claimed:
        return None
    device_type = device.type

    def is_available() -> Capability:
        there = torch.accelerator.current_accelerator(check_available=True) is not None
        if not there:
            return Capability(False, f"torch was built for {device_type} but sees no device")
        note = ONLY_ON_REQUEST.get(device_type)
        reason = f"{torch.accelerator.device_count()} device(s) through torch.accelerator"
        return Capability(True, reason + (f"; used only on request: {note}" if note else ""))

    return Registration(
        name=device_type,
        factory=lambda: GenericAccelerator(device_type),
        is_available=is_available,
        priority=10,
        automatic=device_type not in ONLY_ON_REQUEST,
    )
