"""A `torch.musa` that computes nothing: what torch_musa would bring, with every call written down.

`install()` renames torch's slot for outside devices, which a process can do once: for fresh interpreters.
"""

import sys
import time
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

CALLS: list[str] = []


class Stream:
    def synchronize(self) -> None:
        CALLS.append("Stream.synchronize")

    def wait_stream(self, other: Any) -> None:
        CALLS.append("Stream.wait_stream")


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing, self.at = enable_timing, 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        CALLS.append("Event.wait")

    def synchronize(self) -> None:
        CALLS.append("Event.synchronize")

    def elapsed_time(self, end: "Event") -> float:
        return (end.at - self.at) * 1e3


def namespace(count: int) -> ModuleType:
    """A module in the shape of `torch.musa` with `count` devices."""
    musa = ModuleType("torch.musa")
    current = [0]
    states = {i: torch.zeros(16, dtype=torch.uint8) for i in range(count)}
    stream = Stream()

    @contextmanager
    def use(other: Any) -> Any:
        yield other

    def seed(value: int) -> None:
        states[current[0]] = torch.full((16,), value % 256, dtype=torch.uint8)

    def note(name: str, result: Any = None) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            CALLS.append(name)
            return result

        return call

    functions = {
        "is_available": lambda: count > 0,
        "device_count": lambda: count,
        "current_device": lambda: current[0],
        "set_device": lambda index: current.__setitem__(0, index),
        "get_device_name": lambda index=None: "MTT S4000",
        "Stream": Stream,
        "Event": Event,
        "stream": use,
        "current_stream": lambda: stream,
        "mem_get_info": lambda: (30 << 30, 48 << 30),
        "memory_allocated": lambda: 5,
        "max_memory_allocated": lambda: 7,
        "memory_reserved": lambda: 9,
        "manual_seed": seed,
        "manual_seed_all": seed,
        "_is_in_bad_fork": lambda: False,
        "get_rng_state": lambda index: states[index].clone(),
        "set_rng_state": lambda state, index: states.__setitem__(index, state),
        "is_bf16_supported": lambda: True,
        "amp": SimpleNamespace(autocast=lambda **kwargs: CALLS.append(f"autocast {kwargs}") or nullcontext()),
        "memory": SimpleNamespace(_set_allocator_settings=lambda text: CALLS.append(f"allocator {text}")),
    }
    for name in ("synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        functions[name] = note(name)
    for name, value in functions.items():
        setattr(musa, name, value)
    return musa


def install(count: int = 2) -> None:
    """Give this process a `torch.musa` with `count` devices and the device type "musa"."""
    torch.utils.rename_privateuse1_backend("musa")
    musa = namespace(count)
    torch.musa = musa
    sys.modules["torch.musa"] = musa
