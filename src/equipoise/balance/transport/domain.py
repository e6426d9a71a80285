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
        size = self.space.num_ranks
        for replica in copies.replicas:
            if replica.home // size != replica.host // size:
                raise PlanError(
                    f"the plan has a replica on rank {replica.host} of an expert of rank {replica.home}, in another "
                    f"domain of {size} ranks: choose a planner that keeps balance.domain_size, or transport collective"
                )
        num_slots = self.buffers.num_slots
        first, last = self.first_rank * num_slots, (self.first_rank + size) * num_slots
        experts = copies.slot_expert[first:last]
        local = torch.where(experts < 0, -1, experts - self.first_rank * self.num_masters).to(torch.int32)
        return Copies(local.to(self.space.device, non_blocking=True), ())
