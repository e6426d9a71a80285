"""The backend contract: every operation on a device that the project uses, and nothing else.

A backend is one object. It is made by selection (`equipoise.accelerator.selection`), never by importing a
module, and making it starts no device context: that happens at the first operation that needs one.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity

from equipoise.accelerator.visible_devices import VisibleDevices
from equipoise.errors import ConfigError

#: The questions that `Accelerator.supports` answers.
CAPABILITIES = (
    "bf16",
    "fp16",
    "streams",
    "graphs",
    "ipc",
    "triton",
    "profiler",
    "expandable_segments",
    "memory_snapshot",
    "oom_observer",
)


@dataclass(frozen=True)
class Capability:
    """An answer with its reason. Truthy when the thing asked for works."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class MemoryStats:
    """Memory of one device, in bytes; 0 where the platform does not tell.

    `allocated` and `peak_allocated` are this process's tensors (on CPU its resident memory), `reserved` what
    its allocator holds, `free` and `total` the device's (on CPU the tighter of the cgroup's limit and the
    machine's).
    """

    allocated: int
    peak_allocated: int
    reserved: int
    free: int
    total: int


@dataclass(frozen=True)
class OutOfMemory:
    """What an out-of-memory observer is told: the device's ordinal, and in bytes what was asked for, what this
    process may use of the device in all, and what the device had free."""

    device_index: int
    requested: int
    total: int
    free: int


class Event(Protocol):
    """A point in a stream's work. On CPU, where work is done when a call returns, a point in time."""

    def record(self, stream: Any = None) -> None:
        """Mark the end of what `stream` (default: the current one) holds now."""

    def wait(self, stream: Any = None) -> None:
        """Make later work of `stream` (default: the current one) wait for the mark; the host does not
        wait."""

    def synchronize(self) -> None:
        """Make the host wait for the mark."""

    def elapsed_ms(self, end: Any) -> float:
        """Milliseconds from this mark to `end`'s; both made with `timing=True`. Waits for both."""


class Accelerator(ABC):
    """One kind of device as the project sees it.

    `name` is the backend's name in `EQUIPOISE_ACCELERATOR`; `device_type` is torch's name of the device type
    (both "cuda" on NVIDIA and on ROCm). `visible_devices_variables` are the variables that hide devices from
    a process, the one that wins first.
    """

    name: str
    device_type: str
    visible_devices_variables: tuple[str, ...] = ()

    # Devices

    def device(self, index: int | None = None) -> torch.device:
        """The device with local ordinal `index`; without one, the current device. Always a valid `device=`.

        Raises `ConfigError` when `index` is not an integer of at least 0 (a device string is not an index).
        """
        if index is None:
            index = self.current_device_index()
        return torch.device(self.device_type, checked_index(index, self.device_type))

    @abstractmethod
    def current_device_index(self) -> int:
        """Local ordinal of the current device."""

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Make local ordinal `index` the current device. `ConfigError` when this process does not see it."""

    @abstractmethod
    def device_count(self) -> int:
        """Devices that this process sees. Starts no device context."""

    @abstractmethod
    def device_name(self, index: int | None = None) -> str:
        """The hardware's own name, such as "NVIDIA H200"."""

    def visible_devices(self, environ: Mapping[str, str] | None = None) -> VisibleDevices:
        """What the environment lets this process see (`os.environ` unless another mapping is given)."""
        return VisibleDevices.from_environment(
            self.visible_devices_variables, os.environ if environ is None else environ
        )

    # Work and time

    @abstractmethod
    def synchronize(self) -> None:
        """Make the host wait for all work of the current device."""

    @abstractmethod
    def event(self, timing: bool = False) -> Event:
        """A new event, not yet recorded."""

    @abstractmethod
    def new_stream(self) -> Any:
        """A new stream of the current device, with `synchronize()` and `wait_stream(other)`."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The stream that work is put on now."""

    @abstractmethod
    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside this context, work is put on `stream`. `None` changes nothing."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What `work` puts on the device as one graph, without doing it; calling the result does it, in one launch.

        The graph works on the tensors that `work` did, and whatever `work` made stays valid until the next replay. Work
        of other threads may go on meanwhile. Raises `ConfigError` where `supports("graphs")` is false, `RuntimeError`
        where `work` needs the host in between.
        """
        raise ConfigError(f"work cannot be captured: {self.supports('graphs').reason}")

    # Memory

    @abstractmethod
    def memory(self) -> MemoryStats:
        """Memory of the current device, in bytes."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Let `memory().peak_allocated` start again from what is allocated now."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give cached, unused memory back to the device."""

    def ipc_collect(self) -> None:
        """Release memory that other processes were given and have closed. Does nothing where there is
        none."""
        return None

    def shares_memory(self) -> bool:
        """Whether `share_memory` works: another process of this host can then read a tensor's memory."""
        return False

    def share_memory(self, tensor: torch.Tensor) -> dict[str, Any]:
        """A handle, plain JSON, of the memory of a contiguous tensor on the current device. Other processes may open it
        as often as they like while the tensor lives; what they read later is anything.

        Raises `ConfigError` where `shares_memory` is false.
        """
        raise ConfigError(f"memory of {self.device_type} devices cannot be shared between processes here")

    def open_memory(self, handle: Mapping[str, Any]) -> torch.Tensor:
        """Another process's memory as a flat uint8 tensor, by its handle. It is valid while that process lives.

        Raises `ConfigError` for a handle of another kind, or that is malformed.
        """
        raise ConfigError(f"{handle.get('kind')!r} is not a kind of memory that this process can open")

    def enable_expandable_segments(self) -> Capability:
        """Let the allocator grow its segments in place; the answer says whether it does now."""
        return self.supports("expandable_segments")

    def attach_oom_observer(self, observer: Callable[[OutOfMemory], None]) -> Capability:
        """Call `observer` each time an allocation fails, before the exception; the answer says whether it
        will be.

        An observer that raises is logged and changes nothing about the allocation's own error.
        """
        return self.supports("oom_observer")

    def record_memory_history(self, max_entries: int | None = 100_000) -> None:
        """Start to record allocations with their stacks, the last `max_entries` of them; None stops it.

        Raises `ConfigError` where `supports("memory_snapshot")` is false.
        """
        self._memory_snapshot_namespace()._record_memory_history(
            **({"enabled": None} if max_entries is None else {"max_entries": max_entries})
        )

    def dump_memory_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write what was recorded to `path`, in the format of pytorch.org/memory_viz.

        Raises `ConfigError` where `supports("memory_snapshot")` is false.
        """
        self._memory_snapshot_namespace()._dump_snapshot(os.fspath(path))

    def _memory_snapshot_namespace(self) -> Any:
        """The module with `_record_memory_history` and `_dump_snapshot`."""
        raise ConfigError(f"memory history is not recorded: {self.supports('memory_snapshot').reason}")

    # Random numbers

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the host's generator and the current device's."""

    @abstractmethod
    def rng_state(self) -> torch.Tensor:
        """State of the current device's generator: a uint8 tensor on CPU, owned by the caller."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore what `rng_state` returned."""

    # Communication

    @abstractmethod
    def communication_backend(self) -> str:
        """The transport of this device's tensors, by torch's name: "nccl", "gloo", ..."""

    def world_backend(self) -> str:
        """What `init_process_group` takes, so that host and device tensors each have their transport."""
        return f"cpu:gloo,{self.device_type}:{self.communication_backend()}"

    def weight_update_backend(self) -> str:
        """What a group takes that broadcasts updated weights, and their metadata, to a running engine."""
        return self.communication_backend()

    # Numbers and tools

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Mixed precision in `dtype` on this device; `torch.float32` turns an outer autocast off."""
        if dtype == torch.float32:
            return torch.autocast(self.device_type, enabled=False)
        return torch.autocast(self.device_type, dtype=dtype)

    def profiler_activity(self) -> ProfilerActivity | None:
        """The activity that shows this device in `torch.profiler`, or None where this build has none
        (`supports("profiler")` then says why)."""
        return None

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """The datasheet's dense FLOP/s of the current device in `dtype`, or None when it is not known.

        For `torch.float32` it is the TF32 figure when `torch.get_float32_matmul_precision()` permits TF32.
        """
        return None

    def supports(self, capability: str) -> Capability:
        """Whether one of `CAPABILITIES` works on the current device, and why. Other names are a
        `ValueError`."""
        if capability not in CAPABILITIES:
            raise ValueError(f"unknown capability {capability!r}; expected one of {', '.join(CAPABILITIES)}")
        return self._supports(capability)

    def _supports(self, capability: str) -> Capability:
        """The answer to `supports`; `capability` is one of `CAPABILITIES`."""
        return Capability(False, f"the {self.name} backend does not offer {capability}")

    def limits(self) -> tuple[str, ...]:
        """What training on this device has to do without, in words; empty when nothing is known to be
        missing."""
        return ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, device_type={self.device_type!r})"


def checked_index(index: object, device_type: str) -> int:
    """`index` if it is a device ordinal, otherwise `ConfigError`."""
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise ConfigError(
            f"{index!r} is not a {device_type} device index; give the local ordinal as an integer of at least 0"
        )
    return index
