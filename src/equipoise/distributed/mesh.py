"""Sizes and meshes of the parallel axes: two views of one world of ranks.

Dense parameters see the world as (replicate, shard). Experts see it as (replicate, efsdp, ep), where
shard = efsdp * ep: expert parallelism borrows ranks from the shard axis. Ranks of one EP group are consecutive, so
that they share a node. The axes that are 1 need no group but exist in the meshes all the same.
"""

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from pydantic import Field, PositiveInt
from torch.distributed.device_mesh import DeviceMesh

from equipoise.config import Config, divisors
from equipoise.distributed.world import World
from equipoise.errors import ConfigError


class ParallelConfig(Config):
    """How the model is spread over the ranks. The world size comes from the launcher."""

    ep_size: PositiveInt = 1
    """Ranks that share one set of experts; divides the world size over replicate_size, and num_experts."""
    replicate_size: PositiveInt = 1
    """Copies of the sharded model (HSDP); 1 shards everything over the whole world (FSDP)."""
    dispatcher: Literal["auto", "local", "all_to_all", "all_gather", "symmetric", "deepep"] = "auto"
    """How tokens reach their experts; auto is local for ep_size 1, symmetric with balance.transport symmetric, else
    all_to_all. deepep needs its package."""
    domain_size: int = Field(0, ge=0)
    """Consecutive ranks of an EP group that reach each other's memory (a host's GPUs), for dispatcher and transport
    symmetric: they use it among themselves and messages to the others. 0: all ranks of an EP group do."""
    reshard_after_forward: bool | None = None
    """Whether FSDP frees gathered parameters between forward and backward; false is faster and needs more memory. With
    false, weights that one rank holds whole and computes with in BF16 get BF16 copies that stay, instead of FSDP. none
    is true where several ranks share the weights, and false where one has them all."""
    overlap_shared_experts: bool = False
    """Whether shared experts run beside dispatch and combine of the routed ones, on a stream of their own, with the
    same results. Off, since it saved nothing on two H200s joined by NVLink; slower links have not been measured."""
    timeout_s: float = Field(600.0, gt=0, le=604800)
    """Seconds (a week at most) after which a collective that some rank never joined is an error that names the rank."""


@dataclass(frozen=True)
class AxisSizes:
    """Sizes of all axes; `replicate * shard == world` and `efsdp * ep == shard`. domain: ranks of an EP group that
    reach each other's memory; divides ep."""

    world: int
    replicate: int
    shard: int
    efsdp: int
    ep: int
    domain: int

    def reshards(self, parallel: ParallelConfig) -> bool:
        """What `parallel.reshard_after_forward` means for these sizes."""
        chosen = parallel.reshard_after_forward
        return self.shard > 1 if chosen is None else chosen


def derive_axes(parallel: ParallelConfig, world_size: int, num_experts: int) -> AxisSizes:
    """The sizes of all axes from what the user gave.

    Raises:
        ConfigError: a size does not divide what it has to; names both numbers and the valid values.
    """
    replicate, ep = parallel.replicate_size, parallel.ep_size
    if world_size % replicate:
        raise ConfigError(
            f"parallel.replicate_size is {replicate}, which does not divide the world size {world_size}: "
            f"choose one of {divisors(world_size)}, or start another number of processes"
        )
    shard = world_size // replicate
    if shard % ep:
        others = f"{ep} processes, with --nproc-per-node {ep}" if world_size == 1 else "another number of processes"
        raise ConfigError(
            f"parallel.ep_size is {ep}, which does not divide {shard} ranks (world size {world_size} / "
            f"parallel.replicate_size {replicate}): choose one of {divisors(shard)}, or start {others}"
        )
    if num_experts % ep:
        valid = [d for d in divisors(num_experts) if shard % d == 0]
        raise ConfigError(
            f"model.num_experts is {num_experts}, which parallel.ep_size {ep} does not divide: choose an ep_size of "
            f"{valid} for this world, or a num_experts that is a multiple of {ep}"
        )
    domain = parallel.domain_size or ep
    if ep % domain:
        raise ConfigError(
            f"parallel.domain_size is {domain}, which does not divide parallel.ep_size {ep}: choose one of "
            f"{divisors(ep)}, or 0 where all ranks of an EP group reach each other's memory"
        )
    return AxisSizes(world_size, replicate, shard, shard // ep, ep, domain)


@dataclass(frozen=True)
class Meshes:
    """The two views as device meshes, over groups that the world's registry owns.

    dense: axes (shard,) or, with replicas, (replicate, shard).
    experts: axes (efsdp, ep) or (replicate, efsdp, ep).
    everyone: all ranks on one axis.
    domain: this rank's EP group, or of its domains that of this rank, on one axis.

    Keep a mesh and not its group: groups are others after parking.
    """

    sizes: AxisSizes
    dense: DeviceMesh
    experts: DeviceMesh
    everyone: DeviceMesh
    own_domain: DeviceMesh | None = None

    @property
    def domain(self) -> DeviceMesh:
        return self.ep if self.own_domain is None else self.own_domain

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """Axes over which the experts of one EP rank are sharded (and replicated)."""
        return self.experts[("replicate", "efsdp")] if self.sizes.replicate > 1 else self.experts["efsdp"]

    @property
    def ep(self) -> DeviceMesh:
        return self.experts["ep"]

    @property
    def ep_group(self) -> dist.ProcessGroup:
        return self.experts.get_group("ep")

    @property
    def shard_group(self) -> dist.ProcessGroup:
        return self.dense.get_group("shard")

    @property
    def world_group(self) -> dist.ProcessGroup:
        return self.everyone.get_group()


def build_meshes(sizes: AxisSizes, world: World) -> Meshes:
    """Creates the groups of every axis and the meshes over them. Collective: every rank of the world calls it."""
    grid = [
        [[(r * sizes.efsdp + f) * sizes.ep + e for e in range(sizes.ep)] for f in range(sizes.efsdp)]
        for r in range(sizes.replicate)
    ]
    create = world.groups.create_partition
    ep = create("ep", [ranks for block in grid for ranks in block])
    efsdp = create("efsdp", [list(ranks) for block in grid for ranks in zip(*block)])
    shard = create("shard", [[rank for row in block for rank in row] for block in grid])
    device_type = world.device.type

    def mesh(groups: list[dist.ProcessGroup], ranks: list, names: tuple[str, ...]) -> DeviceMesh:
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
        return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)

    if sizes.replicate == 1:
        dense = mesh([shard], [], ("shard",))
        experts = mesh([efsdp, ep], grid[0], ("efsdp", "ep"))
    else:
        rows = [[rank for row in block for rank in row] for block in grid]
        replicate = create("replicate", [list(column) for column in zip(*rows)])
        dense = mesh([replicate, shard], rows, ("replicate", "shard"))
        experts = mesh([replicate, efsdp, ep], grid, ("replicate", "efsdp", "ep"))
    own_domain = None
    if sizes.domain < sizes.ep:
        domains = [list(range(first, first + sizes.domain)) for first in range(0, sizes.world, sizes.domain)]
        own_domain = mesh([create("domain", domains)], [], ("domain",))
    return Meshes(sizes, dense, experts, mesh([world.group], [], ("everyone",)), own_domain)
