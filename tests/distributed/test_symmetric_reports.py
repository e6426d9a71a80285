"""Faults of others' memory shared by ranks, by their number in SYMPTOMS.md ("Kernels"): two processes of this host.

One rank is slow at each edge of the protocol in turn; what it then finds must be what the others meant it to find.
"""

import time

import pytest
import torch
import torch.distributed as dist

from distributed.balance_rig import E
from distributed.rig import Outcomes, run_scenarios
from distributed.symmetric_rig import CPU, make_space
from equipoise.balance.replicas import Copies
from equipoise.balance.transport.symmetric import SymmetricBuffers, SymmetricTransport
from equipoise.distributed.mesh import Meshes, ParallelConfig
from equipoise.distributed.world import World
from equipoise.kernels.triton_support import triton_problem
from equipoise.symmetric.space import SymmetricSpace

pytestmark = pytest.mark.skipif(triton_problem("cpu") is not None, reason="Triton's interpreter is off or missing")
LATE_S = 0.2
ACROSS = torch.tensor([E // 2, 0])
"""One slot on each of two ranks, for the other rank's first expert."""


def make_transport(space: SymmetricSpace) -> tuple[SymmetricTransport, SymmetricBuffers]:
    buffers = SymmetricBuffers({"w": (6, 5)}, 1, torch.float32, space)
    transport = SymmetricTransport(space, buffers, E // 2)
    transport.prepare("w", CPU, True)
    return transport, buffers


def masters_of(rank: int, step: int) -> torch.Tensor:
    return torch.arange(E // 2 * 30).view(E // 2, 6, 5) + 10_000.0 * rank + 1000 * step


def buffers_made_again(world: World, meshes: Meshes) -> list[bool]:
    """Ranks have allocated and freed differently before, and give up buffers and make others in between."""
    kept = [torch.full((1000 * (i + 1),), 7.0) for i in range(3 * world.rank)]
    space, right = make_space(meshes), []
    for generation in range(3):
        transport, buffers = make_transport(space)
        del kept[::2]
        transport.push_weights("w", Copies(ACROSS.int(), ()), masters_of(world.rank, generation), "weights").wait()
        right.append(torch.equal(buffers.weights("w")[0], masters_of(1 - world.rank, generation)[0]))
        dist.barrier()
        del transport, buffers
        kept += [torch.full((500,), float(generation)) for _ in range(world.rank)]
    return right


def one_rank_is_late(world: World, meshes: Meshes) -> list[str]:
    """What this rank found wrong when rank 0 or rank 1 was late at one of the edges."""
    transport, buffers = make_transport(make_space(meshes))
    copies, wrong, other = Copies(ACROSS.int(), ()), [], 1 - world.rank
    for step, late in enumerate((1, 0, 1, 0)):

        def lag(at: str, late: int = late) -> None:
            """The late rank, before it does this."""
            if world.rank == late:
                time.sleep(LATE_S)

        for again in (step, step + 10):
            lag("offering its weights")
            transport.push_weights("w", copies, masters_of(world.rank, again), "weights").wait()
            lag("using the replica, while the other is on its way to the next push")
            if not torch.equal(buffers.weights("w")[0], masters_of(other, again)[0]):
                wrong.append(f"{again}: weights")
        replica, gradients = torch.full((6, 5), 100.0 * step + world.rank), torch.zeros(E // 2, 6, 5)
        lag("writing its replica's gradient")
        buffers.gradients("w")[0].copy_(replica)
        lag("pulling, while the other wants to write the next gradient")
        transport.pull_gradients("w", copies, [gradients], "gradients").finish(lambda *_: None)
        buffers.gradients("w").fill_(float("nan"))
        if not (gradients[0] == 100 * step + other).all() or gradients[1:].any():
            wrong.append(f"{step}: gradients")
    return wrong


@pytest.fixture(scope="module")
def two() -> Outcomes:
    return Outcomes(run_scenarios, 2, [buffers_made_again, one_rank_is_late], ParallelConfig(ep_size=2), E)


def test_k15_buffers_made_again_are_the_same_on_all_ranks(two: Outcomes) -> None:
    assert two.of(buffers_made_again) == [[True] * 3] * 2


def test_k17_a_late_rank_finds_what_was_meant_for_it(two: Outcomes) -> None:
    assert two.of(one_rank_is_late) == [[]] * 2
