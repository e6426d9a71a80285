"""Delegation to a namespace `torch.<device type>` that looks like `torch.cuda`.

A backend for a device whose torch extension follows that shape needs only its name, its transport and its
tables.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, supported_activities

from equipoise.accelerator.base import Accelerator, Capability, MemoryStats, checked_index
from equipoise.errors import ConfigError


class TorchEvent:
    """An event of a torch namespace; `native` is torch's own object."""

    def __init__(self, native: Any) -> None:
        self.native = native

    def record(self, stream: Any = None) -> None:
        """Mark the end of what `stream` (default: the current one) holds now."""
        self.native.record() if stream is None else self.native.record(stream)

    def wait(self, stream: Any = None) -> None:
        """Make later work of `stream` (default: the current one) wait; the host does not wait."""
        self.native.wait() if stream is None else self.native.wait(stream)

    def synchronize(self) -> None:
        """Make the host wait for the mark."""
        self.native.synchronize()

    def elapsed_ms(self, end: TorchEvent) -> float:
        """Milliseconds from this mark to `end`'s, after waiting for both."""
        self.native.synchronize()
        end.native.synchronize()
        return self.native.elapsed_time(end.native)


class TorchAccelerator(Accelerator):
    """Every operation of the contract by the namespace `torch.<device_type>`, looked up when it is used.

    `allocator_variables` are those that configure the allocator, the one that wins first.
    """

    allocator_variables: tuple[str, ...] = ("PYTORCH_ALLOC_CONF",)

    @property
    def graph_class(self) -> str:
        """The namespace's name for a graph: "CUDAGraph", "MUSAGraph", ..."""
        return f"{self.device_type.upper()}Graph"

    @property
    def namespace(self) -> Any:
        """The module `torch.<device_type>`; `ConfigError` when torch has none."""
        found = getattr(torch, self.device_type, None)
        if found is None:
            raise ConfigError(
                f"torch {torch.__version__} has no namespace torch.{self.device_type}, which the {self.name} "
                "backend needs; install the vendor's torch extension, or choose another EQUIPOISE_ACCELERATOR"
            )
        return found

    def current_device_index(self) -> int:
        """Local ordinal of the current device."""
        return int(self.namespace.current_device())

    def set_device(self, index: int) -> None:
        """Make local ordinal `index` current; `ConfigError` naming what is visible when there are fewer
        devices."""
        count = self.device_count()
        if checked_index(index, self.device_type) >= count:
            raise ConfigError(
                f"{self.device_type} device {index} was asked for, but this process sees {count} device(s) "
                f"({self.visible_devices()}); start at most one process per visible device"
            )
        self.namespace.set_device(index)

    def device_count(self) -> int:
        """Devices that this process sees."""
        return int(self.namespace.device_count())

    def device_name(self, index: int | None = None) -> str:
        """The hardware's own name."""
        return str(self.namespace.get_device_name(index))

    def synchronize(self) -> None:
        """Make the host wait for all work of the current device."""
        self.namespace.synchronize()

    def event(self, timing: bool = False) -> TorchEvent:
        """A new `TorchEvent`."""
        return TorchEvent(self.namespace.Event(enable_timing=timing))

    def new_stream(self) -> Any:
        """A new stream of the current device."""
        return self.namespace.Stream()

    def current_stream(self) -> Any:
        """The stream that work is put on now."""
        return self.namespace.current_stream()

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside this context, work is put on `stream`."""
        return self.namespace.stream(stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """As the contract says, by the namespace's graphs."""
        if not self.supports("graphs"):
            return super().capture(work)
        graph = getattr(self.namespace, self.graph_class)()
        with self.namespace.graph(graph, capture_error_mode="thread_local"):  # others may allocate meanwhile
            work()
        return graph.replay

    def memory(self) -> MemoryStats:
        """Memory of the current device as torch's allocator and the driver count it."""
        free, total = self.namespace.mem_get_info()
        return MemoryStats(
            allocated=int(self.namespace.memory_allocated()),
            peak_allocated=int(self.namespace.max_memory_allocated()),
            reserved=int(self.namespace.memory_reserved()),
            free=int(free),
            total=int(total),
        )

    def reset_peak_memory(self) -> None:
        """Restart the allocator's peaks."""
        self.namespace.reset_peak_memory_stats()

    def empty_cache(self) -> None:
        """Give cached, unused memory back to the device."""
        self.namespace.empty_cache()

    def ipc_collect(self) -> None:
        """Release memory that other processes were given and have closed."""
        collect = getattr(self.namespace, "ipc_collect", None)
        if collect is not None:
            collect()

    def enable_expandable_segments(self) -> Capability:
        """Switch them on, keeping every other allocator setting of the environment."""
        answer = self.supports("expandable_segments")
        if not answer:
            return answer
        kept = [os.environ.get(name, "") for name in self.allocator_variables]
        settings = ",".join([*[text for text in kept if text][:1], "expandable_segments:True"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self._set_allocator(settings)
            except (RuntimeError, ValueError) as error:
                return Capability(False, f"the runtime refused {settings!r}: {error}")
        for warning in caught:
            if "not supported" in str(warning.message):
                return Capability(False, f"the runtime said: {warning.message}")
        return Capability(True, f"allocator settings are now {settings!r}")

    def _set_allocator(self, settings: str) -> None:
        """Give the allocator its settings, in the grammar of its environment variable."""
        self.namespace.memory._set_allocator_settings(settings)

    def _memory_snapshot_namespace(self) -> Any:
        if not self.supports("memory_snapshot"):
            return super()._memory_snapshot_namespace()
        return self.namespace.memory

    def manual_seed(self, seed: int) -> None:
        """Seed the host's generator and the current device's."""
        torch.manual_seed(seed)
        self.namespace.manual_seed(seed)

    def rng_state(self) -> torch.Tensor:
        """State of the current device's generator, uint8 on CPU."""
        return self.namespace.get_rng_state(self.current_device_index())

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore the current device's generator."""
        self.namespace.set_rng_state(state, self.current_device_index())

    def profiler_activity(self) -> ProfilerActivity | None:
        """The device's own activity, or torch's slot for devices from outside; None where this build has
        none."""
        for name in (self.device_type.upper(), "PrivateUse1"):
            activity = getattr(ProfilerActivity, name, None)
            if activity is not None and activity in supported_activities():
                return activity
        return None

    def _supports(self, capability: str) -> Capability:
        answer = getattr(self, f"_supports_{capability}", None)
        if answer is not None:
            return answer()
        if capability == "streams":
            return self._has("Stream")
        if capability == "graphs":
            return self._has("graph", self.graph_class)
        return super()._supports(capability)

    def _supports_ipc(self) -> Capability:
        return self._has("ipc_collect")

    def _supports_memory_snapshot(self) -> Capability:
        return self._has("memory._record_memory_history", "memory._dump_snapshot")

    def _supports_expandable_segments(self) -> Capability:
        return self._has("memory._set_allocator_settings")

    def _supports_bf16(self) -> Capability:
        check = getattr(self.namespace, "is_bf16_supported", None)
        if check is None:
            return Capability(False, f"torch.{self.device_type} does not say that it has bfloat16")
        return Capability(bool(check()), f"torch.{self.device_type}.is_bf16_supported() of {self.device_name()}")

    def _supports_fp16(self) -> Capability:
        return Capability(True, "torch computes float16 on every device of this kind")

    def _supports_profiler(self) -> Capability:
        activity = self.profiler_activity()
        if activity is None:
            return Capability(False, f"this torch's profiler has no activity for {self.device_type}")
        return Capability(True, f"torch.profiler activity {activity.name}")

    def _supports_triton(self) -> Capability:
        try:
            importlib.import_module("triton")
        except ImportError as error:
            return Capability(False, f"triton cannot be imported: {error}")
        return Capability(True, "triton is installed")

    def _has(self, *names: str) -> Capability:
        """Whether the namespace has all of these, which may be dotted."""
        missing = [name for name in names if not _resolves(self.namespace, name)]
        if missing:
            return Capability(False, f"torch.{self.device_type} has no {', '.join(missing)}")
        return Capability(True, f"torch.{self.device_type} has {', '.join(names)}")


def _resolves(module: Any, dotted: str) -> bool:
    for part in dotted.split("."):
        module = getattr(module, part, None)
    return module is not None
