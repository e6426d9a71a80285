"""Values of exact-load balancing: where replicas go and how many tokens each physical expert computes.

Shapes: P ranks of the EP group, E logical experts, M = E / P masters and R replica slots per rank, P * (M + R) physical
experts. Logical expert e has its master on rank e // M. Physical id = rank * (M + R) + local; locals below M
are masters, the others replica slots. Leading dimensions of a `Placement` are a batch of loads.
"""

from dataclasses import dataclass

import torch

from equipoise.errors import ConfigError, PlanError

INT32_MAX = 2**31 - 1


def experts_per_rank(num_experts: int, num_ranks: int) -> int:
    """M. Raises `ConfigError` when the experts cannot be split evenly over the ranks."""
    if num_ranks < 1 or num_experts < 1 or num_experts % num_ranks:
        raise ConfigError(
            f"{num_experts} experts cannot be split evenly over an EP group of {num_ranks} ranks; "
            "choose an ep_size that divides the number of experts"
        )
    return num_experts // num_ranks


@dataclass(frozen=True)
class Placement:
    """The part of a plan that is identical on every rank.

    slot_expert: int32 [..., P*R], the logical expert that each replica slot hosts, -1 where it is free.
    quota: int32 [..., P*(M+R)], tokens that each physical expert computes; 0 for free slots.
    """

    slot_expert: torch.Tensor
    quota: torch.Tensor
    num_ranks: int
    num_experts: int

    @property
    def num_masters(self) -> int:
        """M, masters per rank."""
        return self.num_experts // self.num_ranks

    @property
    def num_slots(self) -> int:
        """R, replica slots per rank."""
        return self.slot_expert.shape[-1] // self.num_ranks

    @property
    def physical_expert(self) -> torch.Tensor:
        """int32 [..., P*(M+R)]: the logical expert of each physical one, -1 for free slots."""
        batch = self.slot_expert.shape[:-1]
        masters = torch.arange(self.num_experts, dtype=torch.int32, device=self.slot_expert.device)
        masters = masters.view(self.num_ranks, self.num_masters).expand(*batch, -1, -1)
        return torch.cat([masters, self.slot_expert.view(*batch, self.num_ranks, self.num_slots)], -1).flatten(-2)

    @property
    def rank_load(self) -> torch.Tensor:
        """int64 [..., P]: tokens that each rank computes."""
        return self.quota.view(*self.quota.shape[:-1], self.num_ranks, -1).sum(-1)

    @property
    def num_copies(self) -> torch.Tensor:
        """int64 [...]: slots in use."""
        return (self.slot_expert >= 0).sum(-1)

    def __getitem__(self, index: int) -> "Placement":
        """One placement of a batch."""
        return Placement(self.slot_expert[index], self.quota[index], self.num_ranks, self.num_experts)

    def to(self, device: torch.device) -> "Placement":
        return Placement(self.slot_expert.to(device), self.quota.to(device), self.num_ranks, self.num_experts)


@dataclass(frozen=True)
class BalancePlan:
    """What one rank needs to know about one layer and one microbatch. See the module docstring for shapes.

    placement: identical on every rank.
    send: int32 [P*(M+R)], tokens that this rank sends to each physical expert.
    recv: int32 [P, M+R], tokens that each rank sends to each physical expert of this rank.

    Over ranks the sends add up to the quotas, and a rank's sends for an expert to its tokens for it: exactly.
    """

    placement: Placement
    send: torch.Tensor
    recv: torch.Tensor
    rank: int

    @property
    def slot_expert(self) -> torch.Tensor:
        return self.placement.slot_expert

    @property
    def quota(self) -> torch.Tensor:
        return self.placement.quota


def empty_placement(load_E: torch.Tensor, num_ranks: int, num_slots: int) -> Placement:
    """No replicas: every expert computes all of its own tokens. `load_E` is an integer tensor [..., E]."""
    batch, num_experts = load_E.shape[:-1], load_E.shape[-1]
    num_masters = experts_per_rank(num_experts, num_ranks)
    free = torch.full((*batch, num_ranks * num_slots), -1, dtype=torch.int32, device=load_E.device)
    quota = load_E.new_zeros(*batch, num_ranks, num_masters + num_slots, dtype=torch.int32)
    quota[..., :num_masters] = load_E.view(*batch, num_ranks, num_masters)
    return Placement(free, quota.flatten(-2), num_ranks, num_experts)


Copy = tuple[int, int, int]
"""Logical expert, receiving rank, tokens of its quota."""


def placement_from_copies(
    load: list[int], num_ranks: int, num_slots: int, copies: list[Copy], device: torch.device | None = None
) -> Placement:
    """One placement from the tokens of each expert and the copies, in the order in which they take a rank's slots."""
    num_masters = experts_per_rank(len(load), num_ranks)
    num_locals = num_masters + num_slots
    slots: list[list[int]] = [[] for _ in range(num_ranks)]
    kept = list(load)
    extra: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert, rank, tokens in copies:
        slots[rank].append(expert)
        extra[rank].append(tokens)
        kept[expert] -= tokens
    slot_expert: list[int] = []
    quota: list[int] = []
    for rank in range(num_ranks):
        free = num_slots - len(slots[rank])
        slot_expert += slots[rank] + [-1] * free
        quota += kept[rank * num_masters : (rank + 1) * num_masters] + extra[rank] + [0] * free
    assert len(quota) == num_ranks * num_locals, "more copies on a rank than slots"
    return Placement(
        torch.tensor(slot_expert, dtype=torch.int32, device=device),
        torch.tensor(quota, dtype=torch.int32, device=device),
        num_ranks,
        len(load),
    )


def check_placement(placement: Placement, load_E: torch.Tensor, domain_size: int = 0) -> None:
    """Raises `PlanError` unless one placement (no batch) keeps every invariant for the load `load_E` [E].

    Tokens conserved; no negative quota; no tokens on a free slot; known experts only; an expert at most once per rank,
    and not in a slot of its home; the largest rank load not above the input's; replicas within their domain.
    Reads tensors on the host.
    """
    if not isinstance(placement, Placement):
        raise PlanError(
            f"a {type(placement).__name__} where a Placement is expected; placement_from_copies makes one, without "
            "copies (copies=[]) that of no balancing"
        )
    P, E = placement.num_ranks, placement.num_experts
    M, R = placement.num_masters, placement.num_slots
    expected = {"slot_expert": (P * R,), "quota": (P * (M + R),)}
    for name, shape in expected.items():
        tensor = getattr(placement, name)
        if tuple(tensor.shape) != shape or tensor.dtype != torch.int32:
            raise PlanError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected torch.int32 {shape}")
    load = load_E.tolist()
    if len(load) != E:
        raise PlanError(f"the load has {len(load)} experts, the placement {E}")
    quota = placement.quota.view(P, M + R).tolist()
    slots = placement.slot_expert.view(P, R).tolist()
    computed = [0] * E
    for rank in range(P):
        for local in range(M + R):
            tokens = quota[rank][local]
            expert = rank * M + local if local < M else slots[rank][local - M]
            where = f"physical expert {rank * (M + R) + local} (rank {rank}, local {local})"
            if not -1 <= expert < E:
                raise PlanError(f"{where} hosts expert {expert}, expected -1 to {E - 1}")
            if tokens < 0 or (expert < 0 and tokens):
                raise PlanError(f"{where} of expert {expert} has a quota of {tokens} tokens")
            if expert >= 0:
                computed[expert] += tokens
            if local >= M and expert >= 0 and domain_size and expert // M // domain_size != rank // domain_size:
                raise PlanError(f"{where} hosts expert {expert} of another domain of {domain_size} ranks")
        hosted = [*range(rank * M, (rank + 1) * M), *(e for e in slots[rank] if e >= 0)]
        if len(set(hosted)) != len(hosted):
            raise PlanError(f"rank {rank} hosts an expert twice: slots {slots[rank]}, masters from {rank * M}")
    for expert in range(E):
        if computed[expert] != load[expert]:
            raise PlanError(f"expert {expert} has {load[expert]} tokens, the quotas compute {computed[expert]}")
    before = max(sum(load[rank * M : (rank + 1) * M]) for rank in range(P))
    after = max(map(sum, quota))
    if after > before:
        raise PlanError(f"the largest rank load rises from {before} to {after} tokens")


def check_plan(plan: BalancePlan, load_PE: torch.Tensor, domain_size: int = 0) -> None:
    """Raises `PlanError` unless `plan` keeps every invariant for the load matrix `load_PE` [P, E]; see above.

    Beyond `check_placement`: this rank's sends add up to its tokens, and what it receives to its quotas.
    """
    placement = plan.placement
    check_placement(placement, load_PE.sum(0), domain_size)
    P, E = placement.num_ranks, placement.num_experts
    local = placement.num_masters + placement.num_slots
    for name, shape in {"send": (P * local,), "recv": (P, local)}.items():
        tensor = getattr(plan, name)
        if tuple(tensor.shape) != shape or tensor.dtype != torch.int32:
            raise PlanError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected torch.int32 {shape}")
        if tensor.numel() and int(tensor.min()) < 0:
            raise PlanError(f"{name} has a negative number of tokens: {int(tensor.min())}")
    expert = placement.physical_expert.long()
    sent = torch.zeros(E + 1, dtype=torch.int64, device=expert.device)
    sent.scatter_add_(0, torch.where(expert < 0, E, expert), plan.send.long())
    if int(sent[E]) or not torch.equal(sent[:E], load_PE[plan.rank].long()):
        raise PlanError(
            f"rank {plan.rank} sends {sent[:E].tolist()} tokens per expert, has {load_PE[plan.rank].tolist()}"
        )
    mine = placement.quota.view(P, local)[plan.rank].long()
    if not torch.equal(plan.recv.long().sum(0), mine):
        raise PlanError(f"rank {plan.rank} receives {plan.recv.sum(0).tolist()}, its quotas are {mine.tolist()}")
    if not torch.equal(plan.send.view(P, local)[plan.rank], plan.recv[plan.rank]):
        raise PlanError(f"rank {plan.rank} sends to itself other numbers of tokens than it receives from itself")
