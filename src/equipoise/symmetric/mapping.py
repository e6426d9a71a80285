"""The two forms of memory that every rank of a group reaches at addresses of its own.

Torch's symmetric memory, for GPUs that reach each other over a fast link (no multicast is used), and shared memory of
one host, for CPU tensors under Triton's interpreter.
"""

import contextlib
import mmap
import os
import platform
import secrets
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from equipoise.distributed.collectives import Group, live_group
from equipoise.errors import ConfigError
from equipoise.kernels.streams import peer_problem

Mapped = tuple[torch.Tensor, list[int]]
Mapper = Callable[[int, dist.ProcessGroup, torch.device], Mapped]
"""Takes bytes to allocate, the group, the device. Returns this rank's bytes and every rank's address as seen here."""


def symmetric_problem(device: torch.device, group: Group | None) -> str | None:
    """None if the group's ranks may try symmetric memory on such a device, otherwise the reason.

    Says what this rank can see alone. Whether every peer can be reached is found out when the space is made.
    """
    if group is None:
        return "there is one rank"
    if device.type == "cpu":
        return None if os.path.isdir("/dev/shm") else "there is no /dev/shm"
    if device.type != "cuda":
        return f"torch has no symmetric memory on {device.type}"
    try:
        import torch.distributed._symmetric_memory as symmetric_memory
    except ImportError as error:
        return f"this torch has no symmetric memory: {error}"
    if not hasattr(symmetric_memory, "rendezvous"):
        return "this torch has no symmetric memory"
    return peer_problem(live_group(group).size())


def host_identity() -> str:
    """Of this host since it was started; containers of one host have the same."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def map_device_memory(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> Mapped:
    import torch.distributed._symmetric_memory as symmetric_memory

    memory = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(memory, group)
    if handle is None:
        raise ConfigError("torch's symmetric memory gave no handle: choose the collective transport and dispatcher")
    _KEPT.append([memory])
    pointers = [handle.get_buffer(peer, (16,), torch.uint8).data_ptr() for peer in range(group.size())]
    return memory, pointers


def map_shared_memory(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> Mapped:
    """Files in /dev/shm that have no name any more when this returns."""
    rank = dist.get_rank(group)
    name = torch.tensor([secrets.randbits(62)])
    dist.broadcast(name, dist.get_process_group_ranks(group)[0], group=group)
    paths = [f"/dev/shm/equipoise-{int(name):x}-{peer}" for peer in range(group.size())]
    file = os.open(paths[rank], os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.ftruncate(file, num_bytes)
        dist.barrier(group)
        memories = []
        for peer, path in enumerate(paths):
            opened = file if peer == rank else os.open(path, os.O_RDWR)
            memories.append(torch.frombuffer(mmap.mmap(opened, num_bytes), dtype=torch.uint8))
            if peer != rank:
                os.close(opened)
        dist.barrier(group)
    finally:
        os.close(file)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(paths[rank])
    _KEPT.append(memories)
    return memories[rank], [memory.data_ptr() for memory in memories]


_KEPT: list[list[torch.Tensor]] = []
"""Peers may write to this memory, and hold addresses of it, as long as they live: it is never given back. Freed memory
could also come back as different blocks on different ranks (torch 2.11)."""
