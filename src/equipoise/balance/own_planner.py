"""Plans of a planner of the user's own: checked at every call, and compared between ranks."""

import torch
import torch.distributed as dist

from equipoise.balance.plan import Placement, PlanError, check_placement
from equipoise.balance.protocol import Planner, PlannerSettings
from equipoise.distributed.agree import raise_together
from equipoise.distributed.collectives import group_device


def place_by_own(
    planner: Planner, name: str, load_PE: torch.Tensor, settings: PlannerSettings, group: dist.ProcessGroup | None
) -> Placement:
    """The planner's placement; collective over `group` (None: one rank). Two small exchanges, which host planners with
    names do without.

    Raises, on every rank:
        PlanError: it broke an invariant, or ranks got different placements, whose replicas would hold the weights of
            other experts than their tokens.
        RankFailure: it failed on other ranks only; their own error is in it.
    """
    placement: Placement | None = None
    failure: Exception | None = None
    try:
        placement = planner(load_PE, settings)
        check_own(placement, load_PE, settings)
    except PlanError as error:
        failure = PlanError(f"planner {name!r}: {error}")
    except Exception as error:
        failure = error
    if group is not None:
        raise_together(failure, group)
    elif failure is not None:
        raise failure
    assert placement is not None
    if group is not None:
        _compare(placement, name, group)
    return placement


def check_own(placement: Placement, load_PE: torch.Tensor, settings: PlannerSettings) -> None:
    """Raises PlanError unless it is a placement for these ranks, slots and loads that keeps every invariant."""
    check_placement(placement, load_PE.sum(0), settings.domain_size)
    found, expected = (placement.num_ranks, placement.num_slots), (load_PE.shape[0], settings.num_slots)
    if found != expected:
        raise PlanError("it is for {} ranks of {} slots, expected {} of {}".format(*found, *expected))


def _compare(placement: Placement, name: str, group: dist.ProcessGroup) -> None:
    mine = torch.cat([placement.slot_expert, placement.quota]).to(group_device(group))
    all_PN = mine.new_empty(group.size(), len(mine))
    dist.all_gather_into_tensor(all_PN.view(-1), mine, group=group)
    differs_P = (all_PN != all_PN[0]).any(1).tolist()
    if any(differs_P):
        raise PlanError(
            f"planner {name!r} gave rank {differs_P.index(True)} of the EP group another placement than rank 0 for the "
            "same load: it has to be deterministic, and to read nothing that differs between ranks (a generator that "
            "is seeded by nobody, the time, the rank)"
        )
