"""Memory of this process and of the host, from the operating system or the container's cgroup. Bytes.

Torch counts no CPU allocations, so the CPU backend reports the process's resident memory and, as the device's
size, the tighter of the machine's memory and the limits of the cgroups that hold the process.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_ROOT = Path("/")


def resident(root: Path = _ROOT) -> int:
    """Resident memory of this process now; 0 where the platform does not tell."""
    return _status_field(root, "VmRSS") or _max_resident()


def peak_resident(root: Path = _ROOT) -> int:
    """Highest resident memory of this process since it started or since `reset_peak`."""
    return _status_field(root, "VmHWM") or _max_resident()


def reset_peak(root: Path = _ROOT) -> bool:
    """Restart the peak of `peak_resident`; False where the platform cannot."""
    try:
        (root / "proc/self/clear_refs").write_text("5")  # resets VmHWM since Linux 4.0
    except OSError:
        return False
    return peak_resident(root) <= resident(root) + (1 << 20)


def available_and_total(root: Path = _ROOT) -> tuple[int, int]:
    """Memory that can still be taken without swapping, and all of it, within the machine and the cgroups."""
    info = _key_values(root / "proc/meminfo", scale=1024)
    total = info.get("MemTotal", 0) or _sysconf("SC_PHYS_PAGES")
    available = info.get("MemAvailable", 0) or _sysconf("SC_AVPHYS_PAGES") or max(0, total - resident(root))
    for limit, used in _cgroup_limits(root):
        total = min(total, limit) if total else limit
        available = min(available, max(0, limit - used))
    return min(available, total), total


def swap(root: Path = _ROOT) -> int:
    """Swap space of the machine, used or not; 0 where the platform does not tell."""
    return _key_values(root / "proc/meminfo", scale=1024).get("SwapTotal", 0)


def keep_freed() -> bool:
    """Makes this process keep memory that it frees for its next allocations; False where the C library cannot.

    glibc maps large blocks afresh, and the system clears every page of them, in every step of a training that allocates
    the same sizes over and over. Blocks of a gigabyte and more are still mapped. What the environment says about the
    allocator (MALLOC_..., GLIBC_TUNABLES) stays as it is. `give_back_freed` undoes the keeping for the moment.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    mallopt = _c_function("mallopt")
    if mallopt is None or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    return bool(mallopt(mmap_threshold, 1 << 30) and mallopt(trim_threshold, (1 << 31) - 1))


def give_back_freed() -> None:
    """Returns freed memory to the system, where the C library can."""
    trim = _c_function("malloc_trim")
    if trim is not None:
        trim(0)


def _c_function(name: str):
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), name, None)  # musl has neither


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, used) of every cgroup above this process that has a limit. Page cache that can be dropped is
    not used."""
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            base, limit_file, used_file, cache_key = (
                "sys/fs/cgroup",
                "memory.max",
                "memory.current",
                "inactive_file",
            )
        elif "memory" in controllers.split(","):
            base, limit_file, used_file = (
                "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
            cache_key = "total_inactive_file"
        else:
            continue
        top = root / base
        # In a container the path may be the host's and not exist; its own cgroup is then mounted at the top.
        parts = [p for p in path.split("/") if p not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folder = top.joinpath(*parts[:depth])
            limit = _integer(folder / limit_file)
            if limit is None or limit >= 1 << 60:  # "max", or version 1's way of saying so
                continue
            cache = _key_values(folder / "memory.stat", scale=1).get(cache_key, 0)
            found.append((limit, max(0, (_integer(folder / used_file) or 0) - cache)))
    return found


def _status_field(root: Path, field: str) -> int:
    return _key_values(root / "proc/self/status", scale=1024).get(field, 0)


def _key_values(path: Path, scale: int) -> dict[str, int]:
    """`name: 12 kB` or `name 12` lines as a dict; other lines are left out."""
    values = {}
    for line in _read(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            values[words[0]] = int(words[1]) * scale
    return values


def _max_resident() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _sysconf(name: str) -> int:
    try:
        return max(0, os.sysconf(name)) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


def _integer(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
