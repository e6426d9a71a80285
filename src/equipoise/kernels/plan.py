"""The whole plan of one rank in one kernel: placement, quotas, sends and receives from the load matrix.

The result is that of `balance/planner.py: plan_loads` and then `balance/splits.py: complete_plan`, bit for bit; these
are its references. Rules and targets come from the caller (`balance/rules.py`): nothing is decided here.
"""

import torch

from equipoise.kernels.triton_support import triton_problem

MAX_RANKS, MAX_EXPERTS, MAX_SLOTS = 256, 1024, 2**12
"""What one warp holds in registers: ranks, experts, and slots of all ranks."""

FINISHER_LOCALS = 8
"""Physical experts of one program that writes the plan, a power of 2."""
OFFER_PERIOD = 1
"""Moves after which a candidate looks at the best offer."""
MAX_LANES = 32
"""Ranks that are laid over a warp's lanes; of more, the lanes share each out among its experts."""
MAX_OWN_SUMS = 1024
"""Largest load matrix that every candidate adds up by itself."""


def _padded(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def plan_problem(device_type: str, num_ranks: int, num_experts: int, num_slots: int) -> str | None:
    """None if the kernel serves these sizes on such a device, otherwise the reason."""
    problem = triton_problem(device_type)
    if problem is not None:
        return problem
    if num_ranks > MAX_RANKS or num_experts > MAX_EXPERTS:
        return f"the plan kernel takes up to {MAX_RANKS} ranks and {MAX_EXPERTS} experts"
    if num_ranks * num_slots > MAX_SLOTS:
        return f"the plan kernel takes up to {MAX_SLOTS} slots of all ranks, not {num_ranks * num_slots}"
    return None


def make_plan_workspace(
    num_ranks: int, num_experts: int, num_slots: int, num_candidates: int, device: torch.device
) -> torch.Tensor:
    """Scratch memory of `plan` (int64, zeros): counters, which every launch leaves at 0 again, and logs of moves.

    Launches that can overlap, as on different streams, need one each.
    """
    size = 64 + num_experts + num_candidates * num_ranks * num_slots
    return torch.zeros(size, dtype=torch.int64, device=device)


@torch.library.custom_op("equipoise::plan", mutates_args=("workspace",))
def plan(
    load_PE: torch.Tensor,
    rules_V4: torch.Tensor,
    steps_K: torch.Tensor,
    workspace: torch.Tensor,
    rank: int,
    num_slots: int,
    tolerance_ppm: int,
    min_tokens: int,
    domain_size: int,
    copy_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One launch, no host sync, the same bits every time.

    Args:
        load_PE: int32, contiguous; tokens of each source rank for each expert, none negative, at most 2**31 - 1 in all
            (not checked: that would be a host sync).
        rules_V4: int32 [V, 4], V <= 8: the giver's sign; whether the receiver is the closest fit for what is to move;
            else the room that is enough (-1: `min_tokens`); fill. See `Variant` of balance/rules.py.
        steps_K: int32 [K], K <= 254: rises of the targets after the tolerated load, in 2**-20.
        workspace: from `make_plan_workspace` for (K + 1) * V candidates.
        rank: whose sends and receives.
        num_slots, tolerance_ppm, min_tokens, domain_size, copy_tokens: see `PlannerSettings` of balance/protocol.py.

    Returns:
        slot_expert int32 [P*R], quota int32 [P*(M+R)], send int32 [P*(M+R)], recv int32 [P, M+R].
    """
    from equipoise.kernels.plan_triton import COLUMNS, plan_kernel

    P, E = load_PE.shape
    R, M = num_slots, E // P
    assert load_PE.dtype == torch.int32, load_PE.dtype
    assert load_PE.is_contiguous()
    num_targets, num_variants = steps_K.numel() + 1, rules_V4.shape[0]
    assert workspace.numel() >= 64 + E + num_targets * num_variants * P * R, "the workspace is another problem's"
    out = _outputs(load_PE, num_slots)
    rank_pad = max(_padded(P), 32)  # below a warp's 32 lanes, reductions are slower
    masters_pad = max(_padded(M), 2)  # with an axis of one element, Triton 3.6 compiles wrong code
    parts = -(-(M + R) // FINISHER_LOCALS)
    own_sums = P * E <= MAX_OWN_SUMS
    summers = 0 if own_sums else -(-E // COLUMNS.value)
    grid = (summers + num_targets * num_variants + 2 * parts * P,)
    plan_kernel[grid](
        load_PE,
        rules_V4,
        steps_K,
        workspace,
        *out,
        rank,
        tolerance_ppm,
        min_tokens,
        copy_tokens,
        num_targets,
        P=P,
        E=E,
        R=R,
        DOMAIN=domain_size or P,
        NUM_VARIANTS=num_variants,
        OWN_SUMS=own_sums,
        HAS_COPY_TIME=copy_tokens > 0,
        OFFER_PERIOD=OFFER_PERIOD,
        LANES=rank_pad <= MAX_LANES,
        P_PAD=rank_pad,
        M_PAD=masters_pad,
        LOCALS=FINISHER_LOCALS,
        PARTS=parts,
        S_PAD=max(_padded(P * R), 2),
        RANK_BITS=rank_pad.bit_length() - 1,
        SLOT_BITS=R.bit_length() if R > 1 else 0,
        MASTER_BITS=masters_pad.bit_length() - 1,
        num_warps=1,
    )
    return out


def _outputs(load_PE: torch.Tensor, num_slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    P, E = load_PE.shape
    num_locals = E // P + num_slots
    return (
        load_PE.new_empty(P * num_slots, dtype=torch.int32),
        load_PE.new_empty(P * num_locals, dtype=torch.int32),
        load_PE.new_empty(P * num_locals, dtype=torch.int32),
        load_PE.new_empty((P, num_locals), dtype=torch.int32),
    )


@plan.register_fake
def _(load_PE, rules_V4, steps_K, workspace, rank, num_slots, *settings):
    return _outputs(load_PE, num_slots)
