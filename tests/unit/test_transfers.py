"""Kernels that move replicas' weights and gradients, rank after rank in one process: what they write, bit for bit, and
nothing else. Their signals have tests among processes, distributed/test_symmetric.py."""

import pytest
import torch

from equipoise.kernels.peers import CHANNELS, CONTROL_WORDS, LIMIT, STATUS, Signals, pull_gradients, push_weights
from equipoise.kernels.triton_support import triton_problem

pytestmark = pytest.mark.skipif(triton_problem("cpu") is not None, reason="Triton's interpreter is off or missing")

NAN = float("nan")
P, M, R = 3, 2, 3
PLANS = {
    "none": [-1] * 9,
    "one": [-1, -1, -1, -1, 0, -1, -1, -1, -1],
    "each at most once per rank": [2, -1, 5, 0, 1, 4, 3, 0, -1],
    "all of one expert, at home too": [3] * 9,
}
SHAPES = {"blocks": (32, 64), "a part of a block": (5, 7), "one element": (1,), "a block and an element": (1025,)}


def ranks() -> tuple[list[Signals], list[torch.Tensor]]:
    """Every rank's signals, where all peers have given theirs for one run of each channel; and what has to live as
    long."""
    status = torch.zeros(8, dtype=torch.int64)
    pads = [torch.full((2 * CHANNELS + 1, P), 1 << 60) for _ in range(P)]
    for pad in pads:
        pad[-1] = 0  # nobody has left
    words = [0] * (CONTROL_WORDS * (CHANNELS + 1))
    words[LIMIT], words[STATUS] = 3, status.data_ptr()
    addresses_P = addresses(pads)
    return [Signals(torch.tensor(words), addresses_P, rank, P) for rank in range(P)], [status, *pads]


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors])


def laid_out(layout: str, experts: torch.Tensor) -> list[torch.Tensor]:
    """A rank's experts: one tensor, as many side by side, or anywhere, without an alignment."""
    if layout == "stacked":
        return [experts.clone()]
    if layout == "in a row":
        return list(experts.clone())
    made = []
    for number, expert in enumerate(experts):
        memory = expert.new_zeros(expert.numel() + 8)
        made.append(memory[number + 1 : number + 1 + expert.numel()].view(expert.shape).copy_(expert))
    return made


@pytest.mark.parametrize("layout", ["stacked", "in a row", "anywhere"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("plan", PLANS)
def test_weights_go_to_the_slots_of_a_part_and_gradients_are_added_in_order(plan: str, shape, layout: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float16 if layout == "in a row" else torch.float32
    slot_expert, stacked = torch.tensor(PLANS[plan], dtype=torch.int32), layout == "stacked"
    weights = torch.randn(P * M, *shape).to(dtype)
    slots = [torch.full((R, *shape), NAN, dtype=dtype) for _ in range(P)]
    wanted = [one.clone() for one in slots]
    signals, alive = ranks()
    masters = [laid_out(layout, weights[rank * M : (rank + 1) * M]) for rank in range(P)]
    for channel, part in enumerate((range(2), range(2, 2), range(2, R)), 1):
        for rank in range(P):
            given = slot_expert, masters[rank], stacked, addresses(slots), M, 2, part
            push_weights(signals[rank], channel, *given)
        for host in range(P):
            for slot in part:
                if (expert := PLANS[plan][host * R + slot]) >= 0:
                    wanted[host][slot] = weights[expert]
        assert all(torch.equal(got.nan_to_num(9), want.nan_to_num(9)) for got, want in zip(slots, wanted)), part
    theirs = [torch.randn(R, *shape) for _ in range(P)]
    for rank in range(P):
        own = torch.randn(M, *shape).to(dtype)
        gradients, sums = laid_out(layout, own), own.float()
        pull_gradients(signals[rank], 0, slot_expert, gradients, stacked, addresses(theirs), M, 2)
        for index, expert in enumerate(PLANS[plan]):
            if expert // M == rank:
                sums[expert % M] += theirs[index // R][index % R]
        assert torch.equal(gradients[0] if stacked else torch.stack(gradients), sums.to(dtype))
    assert not alive[0].any(), "nobody was waited for in vain"
