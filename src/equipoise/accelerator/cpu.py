"""The CPU as a full member: Gloo, streams and events that are valid (work is done when a call returns),
memory from the operating system, shared memory between processes."""

from __future__ import annotations

import platform
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from equipoise.accelerator import host_memory
from equipoise.accelerator.base import Accelerator, Capability, MemoryStats, checked_index
from equipoise.accelerator.registry import Registration


class CPUStream:
    """The one order in which the CPU works. Everything that it was given is done already."""

    def synchronize(self) -> None:
        """Returns at once."""

    def wait_stream(self, stream: Any) -> None:
        """Returns at once."""


class CPUEvent:
    """A point in time on the host's monotonic clock."""

    def __init__(self, timing: bool = False) -> None:
        self.timing = timing
        self._recorded_ns: int | None = None

    def record(self, stream: Any = None) -> None:
        """Mark now."""
        self._recorded_ns = time.perf_counter_ns()

    def wait(self, stream: Any = None) -> None:
        """Returns at once."""

    def synchronize(self) -> None:
        """Returns at once."""

    def elapsed_ms(self, end: CPUEvent) -> float:
        """Milliseconds between the marks. As on a GPU, both events need `timing=True` and a mark."""
        if not (self.timing and end.timing):
            raise RuntimeError("elapsed_ms needs events made with timing=True")
        if self._recorded_ns is None or end._recorded_ns is None:
            raise RuntimeError("elapsed_ms needs two recorded events; call record() on both first")
        return (end._recorded_ns - self._recorded_ns) / 1e6


class CPUAccelerator(Accelerator):
    """Always available; the only backend that never needs a request or hardware."""

    name = "cpu"
    device_type = "cpu"

    def __init__(self) -> None:
        self._stream = CPUStream()
        self._highest_read = 0  # since the last reset
        self._system_resets = True

    def device(self, index: int | None = None) -> torch.device:
        """`torch.device("cpu")` for every index: all ranks of a host share it."""
        if index is not None:
            checked_index(index, self.device_type)
        return torch.device("cpu")

    def current_device_index(self) -> int:
        """Always 0."""
        return 0

    def set_device(self, index: int) -> None:
        """Accepts every local rank. From now on this process keeps freed memory (see `host_memory.keep_freed`)."""
        checked_index(index, self.device_type)
        host_memory.keep_freed()

    def device_count(self) -> int:
        """Always 1."""
        return 1

    def device_name(self, index: int | None = None) -> str:
        """The processor's model name."""
        try:
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        except OSError:
            pass
        return platform.processor() or platform.machine() or "CPU"

    def synchronize(self) -> None:
        """Returns at once."""

    def event(self, timing: bool = False) -> CPUEvent:
        """A `CPUEvent`."""
        return CPUEvent(timing)

    def new_stream(self) -> CPUStream:
        """A stream that is a valid no-op."""
        return CPUStream()

    def current_stream(self) -> CPUStream:
        """The CPU's one stream."""
        return self._stream

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Changes nothing."""
        return nullcontext(stream)

    def memory(self) -> MemoryStats:
        """Resident memory of the process; free and total of the cgroup or the machine, whichever is tighter.

        The peak is the larger of the system's own, where that can be reset (`reset_peak_memory`), and the highest
        value read since.
        """
        now = host_memory.resident()
        self._highest_read = max(now, self._highest_read)  # the system's own peak may lag behind
        peak = max(self._highest_read, host_memory.peak_resident() if self._system_resets else 0)
        free, total = host_memory.available_and_total()
        return MemoryStats(allocated=now, peak_allocated=peak, reserved=now, free=free, total=total)

    def reset_peak_memory(self) -> None:
        """Restart the peak at the present resident memory."""
        self._system_resets = host_memory.reset_peak()
        self._highest_read = host_memory.resident()

    def empty_cache(self) -> None:
        """Returns memory that the C library keeps to the system."""
        host_memory.give_back_freed()

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generators."""
        torch.manual_seed(seed)

    def rng_state(self) -> torch.Tensor:
        """State of the CPU generator, uint8."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore the CPU generator."""
        torch.set_rng_state(state)

    def communication_backend(self) -> str:
        """Always "gloo"."""
        return "gloo"

    def world_backend(self) -> str:
        """Always "gloo"."""
        return "gloo"

    def profiler_activity(self) -> ProfilerActivity:
        """`ProfilerActivity.CPU`."""
        return ProfilerActivity.CPU

    def _supports(self, capability: str) -> Capability:
        answers = {
            "bf16": Capability(True, "torch computes bfloat16 on every CPU, slower than float32 on most"),
            "fp16": Capability(True, "torch computes float16 on every CPU, slower than float32 on most"),
            "streams": Capability(True, "valid no-ops: work is done when a call returns"),
            "ipc": Capability(True, "named shared memory"),
            "profiler": Capability(True, "torch.profiler always records the CPU"),
            "triton": Capability(False, "Triton compiles for GPUs; on CPU it only interprets, for tests"),
            "graphs": Capability(False, "there is no launch cost to capture"),
        }
        return answers.get(capability, Capability(False, "torch has no caching allocator for CPU memory"))


REGISTRATION = Registration(
    name="cpu",
    factory=CPUAccelerator,
    is_available=lambda: Capability(True, "always there; used when nothing else is"),
    priority=0,
    communication_backends=("gloo",),
)
