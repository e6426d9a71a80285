"""A vendor's transport on real processes, played by a registered backend that hands out Gloo's."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from distributed.harness import run_ranks
from equipoise.accelerator import CPUAccelerator, MUSAAccelerator, set_accelerator
from equipoise.distributed.backends import new_group, resolved_backends
from unit import fake_musa


class CPUOverMCCL(CPUAccelerator):
    """CPU tensors carried by a transport called mccl."""

    def communication_backend(self) -> str:
        return "mccl"

    def world_backend(self) -> str:
        return "cpu:mccl"


MADE: list[ProcessGroupGloo] = []  # by the transport that this file registers as mccl


def make_gloo(store, rank: int, size: int, timeout):  # type: ignore[no-untyped-def]
    MADE.append(ProcessGroupGloo(store, rank, size, timeout))
    return MADE[-1]


def broadcast_over_mccl(world: str) -> tuple[str, str, str, list[float]]:
    """Backend names of the world, of a group asked for as nccl and of an inherited one; an async
    broadcast."""
    dist.Backend.register_backend("mccl", make_gloo, devices=["cpu"])
    accelerator = CPUOverMCCL()
    set_accelerator(accelerator)
    dist.init_process_group(world)
    asked, inherited = new_group(accelerator, backend="nccl"), new_group(accelerator)
    x = torch.full((3,), float(dist.get_rank() + 1))
    dist.broadcast(x, src=1, group=asked, async_op=True).wait()
    dist.all_reduce(x, group=inherited)
    names = [dist.get_backend(), dist.get_backend(asked), dist.get_backend(inherited)]
    dist.destroy_process_group()
    MADE.clear()  # Gloo's threads must end before the interpreter does
    return (*names, x.tolist())  # type: ignore[return-value]


@pytest.mark.parametrize(("world_size", "world"), [(2, "cpu:mccl"), (3, "gloo")])
def test_nccl_becomes_the_transport_of_the_accelerator(world_size: int, world: str) -> None:
    """And a group that asks for nothing has the default group's, whatever the accelerator would take for a world."""
    for result in run_ranks(broadcast_over_mccl, world_size, world):
        assert result == (world, "mccl", world, [2.0 * world_size] * 3)


def weight_update_group_on_musa() -> dict[str, object]:
    """A world of two device types: whose transport each has, and a CPU broadcast through a group of it."""
    fake_musa.install(count=2)
    dist.Backend.register_backend("mccl", make_gloo, devices=["musa"])
    accelerator = MUSAAccelerator()
    with resolved_backends(accelerator):
        dist.init_process_group(accelerator.weight_update_backend())
        group = dist.new_group()  # as third-party code does, inheriting the world's backend
    metadata = torch.tensor([float(os.environ["RANK"])])
    dist.broadcast(metadata, src=1, group=group, async_op=True).wait()
    ours = {name: any(group._get_backend(torch.device(name)) is made for made in MADE) for name in ("cpu", "musa")}
    config = str(dist.get_backend_config(group))
    dist.destroy_process_group()
    MADE.clear()
    return {"config": config, "metadata": metadata.item(), "ours": ours}


def test_metadata_and_device_tensors_have_their_own_transports_on_musa() -> None:
    for result in run_ranks(weight_update_group_on_musa, 2):
        assert result == {
            "config": "cpu:gloo,musa:mccl",
            "metadata": 1.0,
            "ours": {"cpu": False, "musa": True},
        }


def own_update_group_on_musa() -> dict[str, object]:
    """A11: the project's weight-update group, which torch's tables do not know: its transports, and a broadcast."""
    from equipoise.distributed.weight_update import UpdateGroup

    fake_musa.install(count=2)
    dist.Backend.register_backend("mccl", make_gloo, devices=["musa"])
    rank, address = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    store = dist.TCPStore(address, int(os.environ["MASTER_PORT"]), 2, rank == 0)
    group = UpdateGroup(MUSAAccelerator(), "update", store, rank, 2, 20)
    names = torch.arange(4.0) * (rank == 0)
    work = group.broadcast(names)
    work.wait()
    ours = {name: any(group._group._get_backend(torch.device(name)) is m for m in MADE) for name in ("cpu", "musa")}
    backend, known = group.backend, dist.is_initialized()
    group.close()
    MADE.clear()
    return {"backend": backend, "names": names.tolist(), "ours": ours, "known": known}


def test_weight_update_groups_are_composite_on_musa() -> None:
    for result in run_ranks(own_update_group_on_musa, 2):
        assert result == {
            "backend": "cpu:gloo,musa:mccl",
            "names": [0.0, 1.0, 2.0, 3.0],
            "ours": {"cpu": False, "musa": True},
            "known": False,
        }
