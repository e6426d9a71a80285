"""Symmetric transport of an EP group of several domains, whose replicas stay within them.

Plans are made on the host, from the load of the whole group; each domain carries out its own part, as if it were a
group with the experts that are at home there.
"""

from collections.abc import Sequence

import torch

from equipoise.balance.replicas import Copies, Masters
from equipoise.balance.transport.symmetric import DevicePull, DeviceWork, SymmetricBuffers, SymmetricTransport
from equipoise.errors import PlanError
from equipoise.symmetric.space import SymmetricSpace


class DomainTransport(SymmetricTransport):
    """See the module docstring. `space`: of the domain, whose first rank is number `first_rank` of the EP group."""

    def __init__(self, space: SymmetricSpace, buffers: SymmetricBuffers, num_masters: int, first_rank: int) -> None:
        super().__init__(space, buffers, num_masters)
        self.first_rank = first_rank

    def push_weights(self, name: str, copies: Copies, masters: Masters, what: str) -> DeviceWork:
        return super().push_weights(name, self._own(copies), masters, what)

    def pull_gradients(self, name: str, copies: Copies, gradients: Sequence[torch.Tensor], what: str) -> DevicePull:
        return super().pull_gradients(name, self._own(copies), gradients, what)

    def _own(self, copies: Copies) -> Copies:
        """The domain's slots, with experts counted from its first.

        Raises:
            PlanError: a replica has left its domain. On all ranks of the group.
        """
        size, num_slots = self.space.num_ranks, self.buffers.num_slots
        experts_DS = copies.slot_expert.view(-1, size * num_slots)  # by domain
        first_D1 = torch.arange(len(experts_DS))[:, None] * size * self.num_masters
        local_DS = experts_DS - first_D1
        if bool(((experts_DS >= 0) & ((local_DS < 0) | (local_DS >= size * self.num_masters))).any()):
            raise PlanError(
                f"the plan has replicas outside of their experts' domains of {size} ranks: choose a planner that keeps "
                "balance.domain_size, or transport collective"
            )
        own = self.first_rank // size
        local = torch.where(experts_DS[own] < 0, -1, local_DS[own]).to(torch.int32)
        return Copies(local.to(self.space.device, non_blocking=True), ())
