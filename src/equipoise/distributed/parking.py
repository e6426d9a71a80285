"""Parking: giving back every communicator of a run for a while, with model, meshes and optimizer kept alive.

Communicators hold memory of the device (NCCL: hundreds of MiB for each), and threads and sockets of the host.
Between two steps a trainer can park, let something else use the device (a rollout engine, say), unpark, and train
on unchanged. In between, the default group is a temporary Gloo WORLD (`torch.distributed.barrier()` works);
every parked group, mesh, DTensor and FSDP module raises when it would communicate.

Torch keeps raw groups in two kinds of places: a root DeviceMesh's registry, and the mesh infos of FSDP units. Both
are dictionaries (of the second kind, of attributes), so one list of them is all that has to be emptied and refilled.
"""

import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from equipoise.distributed.mesh import Meshes
from equipoise.distributed.world import World

logger = logging.getLogger(__name__)

Holder = nn.Module | DeviceMesh | Meshes


def park(world: World, *holders: Holder) -> None:
    """Destroys all process groups of the run, to be rebuilt by `unpark`. Collective; twice is harmless.

    `holders`: every module and mesh that communicates. Call it between steps, with no operation in flight and no
    group kept in a variable. Raises RankFailure, which names them, when ranks are missing; ConfigError, on all
    ranks, when there are groups that were not made through `world.groups`.
    """
    groups = world.groups
    if groups.parked:
        return
    with world.operation("park process groups"):
        world.accelerator.synchronize()
        old = {name: weakref.ref(groups.get(name)) for name in groups.names() if groups.is_member(name)}
        groups.park(_tables(holders))
    if any(group() is not None for group in old.values()):
        gc.collect()
    kept = [name for name, group in old.items() if group() is not None]
    if kept:
        logger.warning(
            "process groups %s are parked but something still refers to them, so not all of their memory is free: "
            "give park() every module and mesh, and keep no group in a variable",
            ", ".join(kept),
        )


def unpark(world: World) -> None:
    """Rebuilds what `park` destroyed; training goes on where it was. Collective; twice is harmless.

    Raises RankFailure, which names them, when ranks are missing.
    """
    with world.operation("unpark process groups"):
        world.groups.unpark()


def _tables(holders: tuple[Holder, ...]) -> list[dict[str, Any]]:
    """The dictionaries in which the holders' meshes and FSDP units keep process groups."""
    tables: dict[int, dict[str, Any]] = {}
    for holder in holders:
        for mesh in _meshes(holder):
            registry = mesh._get_root_mesh()._pg_registry
            tables[id(registry)] = registry
        if isinstance(holder, nn.Module):
            for info in _fsdp_mesh_infos(holder):
                tables[id(info)] = vars(info)
    return list(tables.values())


def _meshes(holder: Holder) -> Iterator[DeviceMesh]:
    if isinstance(holder, DeviceMesh):
        yield holder
    elif isinstance(holder, Meshes):
        yield from (holder.dense, holder.experts, holder.everyone, holder.domain)
    else:
        yield from (info.mesh for info in _fsdp_mesh_infos(holder))
        for tensors in (holder.parameters(), holder.buffers()):
            yield from (tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))


def _fsdp_mesh_infos(module: nn.Module) -> Iterator[Any]:
    """Mesh infos of all FSDP2 units of a module. Torch 2.11 has one parameter group for each unit, 2.13 several."""
    for unit in module.modules():
        if not isinstance(unit, FSDPModule):
            continue
        state: Any = unit._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in filter(None, groups):
            for user in (group, *group.fsdp_params):
                yield from filter(None, (user.mesh_info, user.post_forward_mesh_info))
