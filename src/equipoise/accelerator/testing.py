"""A conformance kit: one set of checks that every backend object passes.

A vendor runs it on a machine that has the device:

from equipoise.accelerator.testing import assert_conforms assert_conforms(MyAccelerator())

or, one test for each check, by parametrizing over `CHECKS` and calling `run_check`. Against a fake namespace,
where no tensor can exist, `tensors=False` leaves out the checks that compute.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from equipoise.accelerator.base import CAPABILITIES, Accelerator, Capability, MemoryStats, OutOfMemory
from equipoise.accelerator.visible_devices import VisibleDevices
from equipoise.errors import ConfigError

_MIB = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """How one check ended: `status` is "passed", "failed" or "skipped"; `detail` says why if it did not
    pass."""

    check: str
    status: str
    detail: str = ""


@dataclass(frozen=True)
class Check:
    """One property of a backend. `function` raises `AssertionError` where it does not hold."""

    name: str
    function: Callable[[Accelerator], None]
    needs_tensors: bool


CHECKS: dict[str, Check] = {}


def run_check(name: str, accelerator: Accelerator, tensors: bool = True) -> Outcome:
    """Run one of `CHECKS`. Never raises for a backend that fails it."""
    check = CHECKS[name]
    if check.needs_tensors and not tensors:
        return Outcome(name, "skipped", "it computes with tensors of the device")
    try:
        check.function(accelerator)
    except Exception as error:  # any error of the backend under test is a finding
        return Outcome(name, "failed", f"{type(error).__name__}: {error}")
    return Outcome(name, "passed")


def run_checks(accelerator: Accelerator, tensors: bool = True) -> list[Outcome]:
    """Run all checks in order."""
    return [run_check(name, accelerator, tensors) for name in CHECKS]


def assert_conforms(accelerator: Accelerator, tensors: bool = True) -> None:
    """Run all checks; `AssertionError` that lists every failure."""
    failures = [o for o in run_checks(accelerator, tensors) if o.status == "failed"]
    if failures:
        lines = "\n".join(f"  {o.check}: {o.detail}" for o in failures)
        raise AssertionError(f"{accelerator!r} fails {len(failures)} of {len(CHECKS)} checks:\n{lines}")


def _check(
    needs_tensors: bool = False,
) -> Callable[[Callable[[Accelerator], None]], Callable[[Accelerator], None]]:
    def add(function: Callable[[Accelerator], None]) -> Callable[[Accelerator], None]:
        CHECKS[function.__name__] = Check(function.__name__, function, needs_tensors)
        return function

    return add


def _require(ok: object, message: str) -> None:
    """`assert` that also holds under `python -O`."""
    if not ok:
        raise AssertionError(message)


def _refuses(call: Callable[[], object], error: type[Exception], what: str) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"{what} must raise {error.__name__}")


@_check()
def names_are_usable(acc: Accelerator) -> None:
    """The name can be written into EQUIPOISE_ACCELERATOR and the device type is one of torch's."""
    _require(acc.name == acc.name.strip().lower() and acc.name not in ("", "auto"), f"bad name {acc.name!r}")
    _require(torch.device(acc.device_type).type == acc.device_type, f"{acc.device_type!r} is no torch device type")
    _require(acc.device_name().strip() != "", "device_name() is blank")


@_check()
def devices_are_local_ordinals(acc: Accelerator) -> None:
    """Devices go by index, strings and other things are refused, and one that is not there cannot be set."""
    count = acc.device_count()
    _require(isinstance(count, int) and count >= 1, f"device_count() is {count!r}")
    acc.set_device(0)
    _require(acc.current_device_index() == 0, "set_device(0) does not make device 0 current")
    for device in (acc.device(), acc.device(0)):
        _require(device.type == acc.device_type, f"device() gives {device}")
    for wrong in (acc.device_type, "0", -1, 1.5, True):
        _refuses(partial(acc.device, wrong), ConfigError, f"device({wrong!r})")  # type: ignore[arg-type]
    if acc.device(count) != acc.device(0):
        _refuses(lambda: acc.set_device(count), ConfigError, f"set_device({count}) with {count} device(s)")


@_check()
def visible_devices_follow_their_variables(acc: Accelerator) -> None:
    """Nothing set shows all; each variable, blank, hides all; the first that is set wins."""
    _require(acc.visible_devices({}) == VisibleDevices(), "an empty environment must show all devices")
    for i, variable in enumerate(acc.visible_devices_variables):
        _require(acc.visible_devices({variable: ""}).ids == (), f"a blank {variable} must hide all devices")
        later = dict.fromkeys(acc.visible_devices_variables[i + 1 :], "1")
        _require(
            acc.visible_devices({variable: "0", **later}).ids == (0,),
            f"{variable} must win over {list(later)}",
        )


@_check()
def events_and_streams_work(acc: Accelerator) -> None:
    """Events are recorded, waited for and timed; streams wait for each other; None is a stream for
    `use_stream`."""
    start, end, mark = acc.event(timing=True), acc.event(timing=True), acc.event()
    stream = acc.new_stream()
    start.record()
    stream.wait_stream(acc.current_stream())
    with acc.use_stream(stream):
        mark.record(stream)
    mark.wait(acc.current_stream())
    mark.wait()
    with acc.use_stream(None):
        end.record(acc.current_stream())
    end.synchronize()
    stream.synchronize()
    acc.synchronize()
    elapsed = start.elapsed_ms(end)
    _require(isinstance(elapsed, float) and elapsed >= 0, f"elapsed_ms gives {elapsed!r}")


@_check()
def memory_is_counted(acc: Accelerator) -> None:
    """Figures are whole bytes that fit each other, also after the peak and the cache were reset."""
    for action in (lambda: None, acc.reset_peak_memory, acc.empty_cache, acc.ipc_collect):
        action()
        stats = acc.memory()
        _require(isinstance(stats, MemoryStats), f"memory() gives {stats!r}")
        values = (stats.allocated, stats.peak_allocated, stats.reserved, stats.free, stats.total)
        _require(all(isinstance(v, int) and v >= 0 for v in values), f"memory() gives {stats}")
        _require(stats.free <= stats.total, f"more is free than there is: {stats}")
        _require(stats.allocated <= stats.peak_allocated, f"the peak is below the present: {stats}")


@_check(needs_tensors=True)
def memory_follows_tensors(acc: Accelerator) -> None:
    """A tensor raises `allocated`, leaves its trace in the peak, and the peak can be reset."""
    acc.empty_cache()
    acc.reset_peak_memory()
    before = acc.memory()
    if before.total == 0:
        return
    x = torch.ones(64 * _MIB, dtype=torch.uint8, device=acc.device())
    held = acc.memory()
    _require(held.allocated - before.allocated >= 60 * _MIB, f"64 MiB more, but {before} became {held}")
    del x
    acc.synchronize()
    after = acc.memory()
    _require(after.peak_allocated > held.allocated - _MIB, f"the peak forgot {held}: {after}")
    acc.empty_cache()  # the CPU's memory is the process's, which keeps what was freed
    acc.reset_peak_memory()
    _require(acc.memory().peak_allocated < held.allocated, "reset_peak_memory() keeps the peak")


@_check()
def generator_state_is_saved(acc: Accelerator) -> None:
    """The state is a uint8 tensor on CPU that can be given back, and seeding is repeatable."""
    acc.manual_seed(11)
    state = acc.rng_state()
    _require(state.dtype == torch.uint8 and state.device.type == "cpu", f"{state.dtype} on {state.device}")
    acc.set_rng_state(state)
    acc.manual_seed(11)
    _require(torch.equal(acc.rng_state(), state), "the same seed gives another state")


@_check(needs_tensors=True)
def random_numbers_repeat(acc: Accelerator) -> None:
    """Restoring the state repeats the numbers; other numbers follow without it."""
    acc.manual_seed(5)
    state = acc.rng_state()
    first, second = (torch.rand(64, device=acc.device()) for _ in range(2))
    acc.set_rng_state(state)
    _require(torch.equal(torch.rand(64, device=acc.device()), first), "the restored state gives other numbers")
    _require(not torch.equal(first, second), "two draws are equal")


@_check()
def transports_are_named(acc: Accelerator) -> None:
    """The world's backend gives host and device tensors a transport, by names that torch takes."""
    own = acc.communication_backend()
    _require(own == own.strip().lower() and own and ":" not in own, f"communication_backend() gives {own!r}")
    world = acc.world_backend()
    pairs = dict(pair.split(":") for pair in world.split(",")) if ":" in world else {acc.device_type: world}
    _require(pairs.get(acc.device_type) == own, f"{world!r} does not carry {acc.device_type} tensors over {own}")
    _require("cpu" in pairs or world == "gloo", f"{world!r} does not carry CPU tensors")
    update = acc.weight_update_backend()
    _require(update in (own, world), f"weight_update_backend() gives {update!r}, neither {own!r} nor {world!r}")


@_check()
def capabilities_have_reasons(acc: Accelerator) -> None:
    """Every question gets an answer with a reason; a question that nobody asks is an error."""
    for capability in CAPABILITIES:
        answer = acc.supports(capability)
        _require(isinstance(answer, Capability) and answer.reason.strip(), f"supports({capability!r}): {answer!r}")
    _refuses(lambda: acc.supports("telepathy"), ValueError, "supports() of an unknown capability")
    _require((acc.profiler_activity() is not None) == acc.supports("profiler").ok, "the profiler's answers differ")


@_check()
def peak_rates_are_known_or_none(acc: Accelerator) -> None:
    """A peak rate is a positive FLOP/s or None."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int8):
        rate = acc.peak_flops(dtype)
        _require(rate is None or rate > 1e9, f"peak_flops({dtype}) gives {rate!r}")


@_check(needs_tensors=True)
def autocast_changes_the_type(acc: Accelerator) -> None:
    """Inside, products have the type asked for; float32 turns an outer autocast off."""
    a = torch.ones(8, 8, device=acc.device())
    if acc.supports("bf16"):
        with acc.autocast(torch.bfloat16):
            _require((a @ a).dtype == torch.bfloat16, "autocast(bfloat16) has no effect")
            with acc.autocast(torch.float32):
                _require((a @ a).dtype == torch.float32, "autocast(float32) does not turn the outer one off")


@_check(needs_tensors=True)
def memory_history_is_written(acc: Accelerator) -> None:
    """What was recorded lands in a file; where nothing is recorded, that is said."""
    if not acc.supports("memory_snapshot"):
        _refuses(acc.record_memory_history, ConfigError, "record_memory_history()")
        return
    acc.record_memory_history(max_entries=100)
    torch.ones(_MIB, device=acc.device())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        acc.dump_memory_snapshot(path)
        size = path.stat().st_size
    acc.record_memory_history(max_entries=None)
    _require(size > 0, "the snapshot is empty")


@_check(needs_tensors=True)
def failed_allocations_are_observed(acc: Accelerator) -> None:
    """The observer sees an allocation that cannot succeed; one that raises does not replace the error."""
    seen: list[OutOfMemory] = []

    def observe(event: OutOfMemory) -> None:
        seen.append(event)
        raise RuntimeError("an observer that fails")

    answer = acc.attach_oom_observer(observe)
    _require(answer.ok == acc.supports("oom_observer").ok, f"attach_oom_observer: {answer}")
    if not answer:
        return
    asked = acc.memory().total * 2
    _refuses(
        lambda: torch.empty(asked, dtype=torch.uint8, device=acc.device()),
        torch.OutOfMemoryError,
        f"{asked} bytes",
    )
    _require([e.requested for e in seen] and seen[-1].requested >= asked, f"the observer saw {seen}")


@_check()
def the_environment_is_left_alone(acc: Accelerator) -> None:
    """No operation changes a variable or the working folder."""
    before = dict(os.environ), os.getcwd()
    acc.device()
    acc.memory()
    acc.synchronize()
    acc.empty_cache()
    acc.supports("bf16")
    acc.profiler_activity()
    _require((dict(os.environ), os.getcwd()) == before, "a variable or the working folder changed")
