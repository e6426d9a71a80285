"""The CPU is a full member: valid streams and events, memory of the OS or cgroup, RNG, and one device for all
ranks."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from equipoise.accelerator import CAPABILITIES, CPUAccelerator, host_memory
from equipoise.accelerator.base import Capability
from equipoise.errors import ConfigError

GIB = 1 << 30


@pytest.fixture
def cpu() -> CPUAccelerator:
    return CPUAccelerator()


def test_events_measure_time(cpu: CPUAccelerator) -> None:
    start, end = cpu.event(timing=True), cpu.event(timing=True)
    start.record(cpu.current_stream())
    time.sleep(0.02)
    end.record()
    end.synchronize()
    assert 20.0 <= start.elapsed_ms(end) < 2000.0


@pytest.mark.parametrize(("timing", "recorded"), [(False, True), (True, False)])
def test_events_that_cannot_be_compared_say_so(cpu: CPUAccelerator, timing: bool, recorded: bool) -> None:
    start, end = cpu.event(timing), cpu.event(timing)
    if recorded:
        start.record()
        end.record()
    with pytest.raises(RuntimeError, match=r"timing=True|record\(\)"):
        start.elapsed_ms(end)


def test_streams_are_valid_and_change_nothing(cpu: CPUAccelerator) -> None:
    stream, event = cpu.new_stream(), cpu.event()
    stream.wait_stream(cpu.current_stream())
    with cpu.use_stream(stream):
        x = torch.ones(3) + 1
        event.record(stream)
    event.wait(cpu.current_stream())
    cpu.current_stream().synchronize()
    cpu.synchronize()
    cpu.empty_cache()
    assert x.tolist() == [2, 2, 2]
    with cpu.use_stream(None):
        pass


@pytest.mark.parametrize("index", [None, 0, 3])
def test_every_rank_of_a_host_gets_a_device_that_torch_accepts(cpu: CPUAccelerator, index: int | None) -> None:
    assert torch.empty(1, device=cpu.device(index)).device == torch.device("cpu")
    if index is not None:
        cpu.set_device(index)
    assert cpu.current_device_index() == 0
    assert cpu.device_count() == 1


@pytest.mark.parametrize("index", ["cpu", "0", -1, 1.0, True])
def test_a_device_string_is_not_an_index(cpu: CPUAccelerator, index: object) -> None:
    with pytest.raises(ConfigError, match="is not a cpu device index"):
        cpu.device(index)  # type: ignore[arg-type]


def test_memory_follows_the_process(cpu: CPUAccelerator) -> None:
    cpu.reset_peak_memory()
    before = cpu.memory()
    x = torch.ones(64 << 20, dtype=torch.uint8)
    held = cpu.memory()
    assert held.allocated - before.allocated > 60 << 20
    del x
    cpu.empty_cache()
    after = cpu.memory()
    assert after.peak_allocated > held.allocated - (1 << 20)  # the kernel counts in batches of pages
    cpu.reset_peak_memory()
    assert cpu.memory().peak_allocated < held.allocated
    assert 0 < after.free <= after.total
    assert after.allocated <= after.total


def test_the_peak_works_where_the_system_cannot_reset_its_own(
    cpu: CPUAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "reset_peak", lambda: False)
    monkeypatch.setattr(host_memory, "peak_resident", lambda: 900)
    resident = iter([500, 100, 300, 200])
    monkeypatch.setattr(host_memory, "resident", lambda: next(resident))
    assert cpu.memory().peak_allocated == 900
    cpu.reset_peak_memory()
    assert [cpu.memory().peak_allocated for _ in range(2)] == [300, 300]


def test_a_peak_that_was_read_is_not_forgotten_where_the_systems_own_lags(
    cpu: CPUAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux counts resident pages per processor, and its peak misses what is freed before they are summed."""
    monkeypatch.setattr(host_memory, "reset_peak", lambda: True)
    monkeypatch.setattr(host_memory, "peak_resident", lambda: 150)
    resident = iter([100, 300, 200])
    monkeypatch.setattr(host_memory, "resident", lambda: next(resident))
    cpu.reset_peak_memory()
    assert [cpu.memory().peak_allocated for _ in range(2)] == [300, 300]


def fake_root(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A file tree that looks like Linux's /proc and /sys, on a machine of 8 GiB with 6 GiB free."""
    memory = f"MemTotal: {8 * GIB // 1024} kB\nMemFree: 0 kB\nMemAvailable: {6 * GIB // 1024} kB\n"
    for name, text in {"proc/meminfo": memory, "proc/self/cgroup": cgroup, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, (6, 8)),
        ("0::/a/b\n", {f"{V2}/a/b/memory.max": "max\n"}, (6, 8)),
        (
            "0::/a/b\n",
            {
                f"{V2}/a/memory.max": f"{4 * GIB}\n",
                f"{V2}/a/memory.current": f"{2 * GIB}\n",
                f"{V2}/a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
                f"{V2}/a/b/memory.max": "max\n",
            },
            (3, 4),
        ),
        # Inside a container: the path is the host's, the cgroup is mounted at the top.
        (
            "5:memory:/docker/f00\n",
            {f"{V1}/memory.limit_in_bytes": f"{2 * GIB}", f"{V1}/memory.usage_in_bytes": f"{GIB}"},
            (1, 2),
        ),
        ("5:memory:/\n", {f"{V1}/memory.limit_in_bytes": "9223372036854771712"}, (6, 8)),
        # A limit above what the machine has left does not raise it.
        ("0::/\n", {f"{V2}/memory.max": f"{64 * GIB}", f"{V2}/memory.current": "0"}, (6, 8)),
        # Over the limit for a moment.
        ("0::/\n", {f"{V2}/memory.max": f"{GIB}", f"{V2}/memory.current": f"{2 * GIB}"}, (0, 1)),
    ],
)
def test_the_tightest_cgroup_bounds_the_memory(tmp_path: Path, cgroup: str, files: dict, expected: tuple) -> None:
    free, total = host_memory.available_and_total(fake_root(tmp_path, cgroup, files))
    assert (free / GIB, total / GIB) == expected


def test_a_platform_without_proc_still_answers(tmp_path: Path) -> None:
    assert host_memory.resident(tmp_path) >= 0
    assert not host_memory.reset_peak(tmp_path)
    free, total = host_memory.available_and_total(tmp_path)
    assert 0 <= free <= total


def test_random_numbers_repeat_after_seeding_and_restoring(cpu: CPUAccelerator) -> None:
    cpu.manual_seed(7)
    state = cpu.rng_state()
    first = torch.rand(5)
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(5), first)
    cpu.manual_seed(7)
    assert torch.equal(torch.rand(5), first)
    assert (state.dtype, state.device.type) == (torch.uint8, "cpu")


def test_autocast_in_float32_turns_an_outer_one_off(cpu: CPUAccelerator) -> None:
    a = torch.ones(2, 2)
    with cpu.autocast(torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        with cpu.autocast(torch.float32):
            assert (a @ a).dtype == torch.float32


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_capability_has_a_reason(cpu: CPUAccelerator, capability: str) -> None:
    answer = cpu.supports(capability)
    assert answer.reason
    assert bool(answer) is answer.ok


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ("graphs", "there is no launch cost to capture"),
        ("triton", "Triton compiles for GPUs; on CPU it only interprets, for tests"),
        ("oom_observer", "torch has no caching allocator for CPU memory"),
    ],
)
def test_what_it_has_not_has_its_own_reason(cpu: CPUAccelerator, capability: str, reason: str) -> None:
    assert cpu.supports(capability) == Capability(False, reason)


def test_an_unknown_capability_is_an_error(cpu: CPUAccelerator) -> None:
    with pytest.raises(ValueError, match="unknown capability 'fp7'; expected one of bf16"):
        cpu.supports("fp7")


def test_names_and_transports(cpu: CPUAccelerator) -> None:
    assert (cpu.name, cpu.device_type) == ("cpu", "cpu")
    assert (cpu.communication_backend(), cpu.world_backend()) == ("gloo", "gloo")
    assert cpu.device_name()
    assert cpu.profiler_activity() is torch.profiler.ProfilerActivity.CPU
    assert cpu.peak_flops(torch.float32) is None


FREES_MEMORY = """
import os, torch
from equipoise.accelerator import host_memory
from equipoise.accelerator.cpu import CPUAccelerator
cpu = CPUAccelerator()
cpu.set_device(0)
before = host_memory.resident()
for _ in range(3):
    x = torch.ones(64 << 20)  # 256 MiB
    guard = torch.ones(1)  # behind it on the heap
    del x
print(host_memory.resident() - before >> 20)
cpu.empty_cache()
print(host_memory.resident() - before >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc keeps freed memory, others do not")
@pytest.mark.parametrize("user_decides", [False, True])
def test_freed_memory_is_kept_until_it_is_asked_for(user_decides: bool) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    if user_decides:
        env["MALLOC_MMAP_THRESHOLD_"] = "131072"
    output = subprocess.run([sys.executable, "-c", FREES_MEMORY], env=env, capture_output=True, text=True, check=True)
    kept, after = map(int, output.stdout.split())
    assert kept < 64 if user_decides else kept > 200
    assert after < 64
