"""The two-call dispatcher protocol: rows to the ranks that own their experts, and back.

Shapes: T local tokens, K slots per token, D features, E experts in all, P ranks of the EP group, M = E / P experts
per rank (expert e lives on rank e // M), R rows received by this rank.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from equipoise.distributed.collectives import Group, live_group
from equipoise.kernels.rows import RowMaker


@dataclass(frozen=True)
class Dispatched:
    """What arrived at this rank.

    rows_RD: rows grouped by local expert, in expert order.
    counts_M: int64 on the rows' device, rows of each local expert. Rows past their sum belong to nobody.
    handle: the dispatcher's own record of the exchange, to be given to `combine` once.
    make_rows: for experts that can choose where they write: memory for their outputs and for the gradient of their
        rows, which then need not be copied, and which `combine` and the backward may overwrite; None where it makes no
        difference.
    weights_R: weights that the experts have to give their outputs, since `combine` adds them as they are; None where it
        is `combine` that multiplies.
    """

    rows_RD: torch.Tensor
    counts_M: torch.Tensor
    handle: Any
    make_rows: RowMaker | None = None
    weights_R: torch.Tensor | None = None


class Exchange(NamedTuple):
    """How many rows move, known on the host before the dispatch (from a balancing plan): it saves asking the peers.

    send_PM: integers on the CPU, rows from this rank to each expert of each rank. receive_PM: rows from each rank to
    each expert of this one.
    """

    send_PM: torch.Tensor
    receive_PM: torch.Tensor


class DeviceExchange(NamedTuple):
    """The same, known on the device alone (J physical experts): for dispatchers that never ask the host.

    row_TK: the place of each slot among this rank's rows, sorted by physical id. valid_TK: False where a slot has no
    expert; None: all have one. send_J: int32, this rank's rows for each expert. quota_J: int32, all ranks' rows for it.
    before_J: int32, those of the ranks before this one.
    """

    row_TK: torch.Tensor
    valid_TK: torch.Tensor | None
    send_J: torch.Tensor
    quota_J: torch.Tensor
    before_J: torch.Tensor


AnyExchange = Exchange | DeviceExchange | None
"""What is known of an exchange beforehand. Dispatchers ask for what they cannot use."""


class Dispatcher(Protocol):
    """Moves tokens between ranks. Holds no state of a microbatch, so any number can be in flight.

    Every rank of the group calls `dispatch` and `combine` in the same order, also with zero tokens. An id of -1
    is dispatched nowhere and adds exactly 0. No row is dropped otherwise.
    """

    num_local_experts: int

    def dispatch(
        self,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        exchange: AnyExchange = None,
    ) -> Dispatched:
        """Sends each token to the experts of its ids (int32 or int64); differentiable in x and weights.

        `exchange` has to agree with the ids on every rank; dispatchers that do not need it leave it alone.
        """
        ...

    def combine(self, rows_RD: torch.Tensor, handle: Any) -> torch.Tensor:
        """y_TD: each token's expert outputs times its weights, summed in FP32, in the dtype of the rows."""
        ...


class GroupDispatcher:
    """What dispatchers over several ranks share: the group, which parking replaces, and the split of the experts."""

    def __init__(self, num_experts: int, group: Group) -> None:
        """`group` is any torch process group, or a mesh of one axis; experts are split evenly over its ranks."""
        self._group = group
        self.num_experts, self.num_ranks = num_experts, group.size()
        self.num_local_experts = num_experts // self.num_ranks

    @property
    def group(self) -> dist.ProcessGroup:
        """The present group: another one after parking, none while parked."""
        return live_group(self._group)
