"""Two ranks on one GPU: memory of one process mapped into the other, for tests of kernels that wait for each other.

The device runs one process at a time, so every signal takes a time slice: right for results, useless for times.
"""

import json
from datetime import timedelta

import torch
import torch.distributed as dist

from equipoise.symmetric.mapping import Mapped

_KEPT: list[list[torch.Tensor]] = []


def share_device_memory(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> Mapped:
    """A `Mapper` over CUDA's handles for other processes."""
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    rank, store = dist.get_rank(group), group.get_group_store()
    mine = memory.untyped_storage()._share_cuda_()
    key = lambda peer: f"shared-{len(_KEPT)}-{peer}"  # noqa: E731
    store.set(key(rank), json.dumps([part.hex() if isinstance(part, bytes) else part for part in mine]))
    tensors = []
    for peer in range(group.size()):
        if peer == rank:
            tensors.append(memory)
            continue
        store.wait([key(peer)], timedelta(seconds=60))
        parts = json.loads(store.get(key(peer)))
        is_bytes = [isinstance(part, bytes) for part in mine]
        parts = [bytes.fromhex(part) if binary else part for part, binary in zip(parts, is_bytes)]
        storage = torch.UntypedStorage._new_shared_cuda(*parts)
        tensors.append(torch.empty(0, dtype=torch.uint8, device=device).set_(storage))
    _KEPT.append(tensors)
    return memory, [tensor.data_ptr() for tensor in tensors]
