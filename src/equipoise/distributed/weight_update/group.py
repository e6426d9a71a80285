"""A process group of a trainer rank and an engine's ranks, which are of different worlds.

It is made as the serving engines make theirs (a TCP store at the sender's address, the name as prefix), and belongs
to whoever made it: torch's tables do not know it, so neither parking nor leaving a world touches it.
"""

import contextlib
import threading
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from equipoise.accelerator import Accelerator
from equipoise.distributed.backends import resolve_backend
from equipoise.errors import WeightUpdateError


def serve_store(address: str, timeout_s: float) -> dist.TCPStore:
    """The store over which a group meets, on a free port of this host (`store.port`). It lives as long as the group."""
    return dist.TCPStore(address, 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)


def reach_store(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The store of a sender. Raises WeightUpdateError when nobody answers there."""
    try:
        return dist.TCPStore(address, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
    except (RuntimeError, OSError, ValueError) as error:
        raise WeightUpdateError(
            f"no store at {address}:{port} within {timeout_s:g} s ({str(error).splitlines()[0]}): is the trainer "
            "running, and is this its address as seen from here?"
        ) from None


class UpdateGroup:
    """Rank 0 sends. `timeout_s` bounds every wait of this group; `close` gives up whatever is under way."""

    def __init__(
        self,
        accelerator: Accelerator,
        name: str,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_s: float,
        backend: str | None = None,
    ) -> None:
        """Meets the others: collective over the group. `backend`: the accelerator's for weight updates by default.

        Raises:
            WeightUpdateError: the others did not come in time.
        """
        self.name, self.rank, self.size, self.timeout_s = name, rank, size, timeout_s
        self.backend = resolve_backend(backend or accelerator.weight_update_backend(), accelerator)
        self._store = store
        try:
            # NCCL's own watchdog ends the process at its timeout: whoever waits for a broadcast gives up before.
            own_timeout_s = timeout_s if self.backend == "gloo" else 3 * timeout_s
            self._group: Any = _make(self.backend, dist.PrefixStore(name, store), rank, size, name, own_timeout_s)
        except (RuntimeError, ValueError) as error:
            raise WeightUpdateError(
                f"weight-update group {name!r} ({self.backend}): {size} ranks did not meet within {timeout_s:g} s: "
                f"{str(error).splitlines()[0]}"
            ) from error
        self._lock = threading.Lock()

    def broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """Starts sending rank 0's tensor, or receiving it; on the current stream of an accelerator."""
        options: Any = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if hasattr(options, "asyncOp"):
            options.asyncOp = True
        group = self._group
        if group is None:
            raise WeightUpdateError(f"weight-update group {self.name!r} is closed")
        return group.broadcast([tensor], options)

    def close(self, *, abort: bool = False) -> None:
        """Ends the group. `abort`: without the others. Twice is harmless."""
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            return
        # A backend may wait for a peer that is gone: whoever gives up does not.
        ending = threading.Thread(target=_end, args=[[group], abort], daemon=True)
        del group
        ending.start()
        ending.join(1.0 if abort else self.timeout_s)


def _end(holder: list[Any], abort: bool) -> None:
    group = holder.pop()
    for device in group._device_types:
        with contextlib.suppress(Exception):  # a backend without them: dropping it is all there is
            backend = group._get_backend(device)
            (backend.abort if abort else backend.shutdown)()


def _make(backend: str, store: dist.Store, rank: int, size: int, name: str, timeout_s: float) -> Any:
    """A group with the store's keys where `init_process_group` has them, known to nobody but the caller."""
    prefix = dist.PrefixStore(f"{name}/", store)
    group: Any = dist.ProcessGroup(prefix, rank, size)
    group._set_group_name(name)
    group._set_group_desc(name)
    made: dict[str, tuple[Any, Any]] = {}
    for device, transport in c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map().items():
        if transport not in made:
            own = dist.PrefixStore(f"{device}/", prefix)
            made[transport] = _transport(transport, own, rank, size, name, timedelta(seconds=timeout_s))
        group._register_backend(torch.device(device), *made[transport])
    group._set_default_backend(next(reversed(made.values()))[0])
    return group


def _transport(
    transport: str, store: dist.Store, rank: int, size: int, name: str, timeout: timedelta
) -> tuple[Any, Any]:
    """Torch's type of a backend, and a new one."""
    types = dist.ProcessGroup.BackendType
    if transport == "gloo":
        return types.GLOO, dist.ProcessGroupGloo(store, rank, size, timeout)  # type: ignore[arg-type]
    if transport == "nccl":
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout, options.group_name = timeout, name
        return types.NCCL, dist.ProcessGroupNCCL(store, rank, size, options)
    plugin = dist.Backend._plugins[transport.upper()]
    if not plugin.extended_api:
        return types.CUSTOM, plugin.creator_fn(store, rank, size, timeout)
    settings: Any = c10d._DistributedBackendOptions()
    settings.store, settings.group_rank, settings.group_size = store, rank, size
    settings.timeout, settings.group_id, settings.global_ranks_in_group = timeout, name, []
    return types.CUSTOM, plugin.creator_fn(settings, None)
