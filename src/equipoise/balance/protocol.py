"""The public protocol of planners, and the settings that they all get."""

from dataclasses import dataclass
from typing import Protocol

import torch

from equipoise.balance.plan import INT32_MAX, Placement, experts_per_rank
from equipoise.balance.rules import MAX_COPIES, MAX_COPY_TOKENS
from equipoise.errors import ConfigError

PPM = 1_000_000


@dataclass(frozen=True)
class PlannerSettings:
    """What a planner may use, and when a replica is worth it.

    num_slots: replica slots per rank (R).
    tolerance: share of the mean rank load by which the largest may exceed it before anything is moved (0.01 = 1 %).
    min_tokens: no replica gets fewer tokens than this.
    domain_size: replicas stay within groups of this many consecutive ranks (those joined by a fast link); 0: one group.
    copy_tokens: time of one weight copy, in tokens that an expert computes in the same time; see `balance/cost.py`.
        With 0 copies are free, and only the tolerance limits them.
    """

    num_slots: int = 1
    tolerance: float = 0.01
    min_tokens: int = 1
    domain_size: int = 0
    copy_tokens: int = 0

    def __post_init__(self) -> None:
        if self.num_slots < 0:
            raise ConfigError(f"num_slots is {self.num_slots}; expected 0 or more replica slots per rank")
        if not 0 <= self.tolerance <= 1000:
            raise ConfigError(f"tolerance is {self.tolerance}; expected a share of the mean such as 0.01")
        if not 1 <= self.min_tokens <= INT32_MAX:
            raise ConfigError(f"min_tokens is {self.min_tokens}; expected 1 to {INT32_MAX}")
        if self.domain_size < 0:
            raise ConfigError(f"domain_size is {self.domain_size}; expected 0 (no domains) or a number of ranks")
        if not 0 <= self.copy_tokens <= MAX_COPY_TOKENS:
            raise ConfigError(f"copy_tokens is {self.copy_tokens}; expected 0 to {MAX_COPY_TOKENS}")

    @property
    def tolerance_ppm(self) -> int:
        """The tolerance in millionths: planners compute with integers alone."""
        return round(self.tolerance * PPM)


class Planner(Protocol):
    """Turns the load matrix into a placement, identically on every rank.

    `load_PE`: integer tensor [P, E], tokens of each source rank for each logical expert. Every rank passes equal
    values; a planner must therefore be deterministic, and must not read anything that differs between ranks.
    A planner that learns from earlier loads keeps them itself: one object serves one layer.
    """

    def __call__(self, load_PE: torch.Tensor, settings: PlannerSettings) -> Placement: ...


def check_sizes(num_experts: int, num_ranks: int, settings: PlannerSettings) -> None:
    """Refuses sizes that no planner can serve.

    Raises:
        ConfigError: experts or ranks do not divide evenly over ranks or domains, or there are too many slots.
    """
    experts_per_rank(num_experts, num_ranks)
    if settings.domain_size and num_ranks % settings.domain_size:
        raise ConfigError(
            f"{num_ranks} ranks cannot be split into domains of {settings.domain_size} ranks; "
            "choose a domain_size that divides the size of the EP group, or 0 for one domain"
        )
    if num_ranks * settings.num_slots > MAX_COPIES:
        raise ConfigError(f"{num_ranks} ranks with {settings.num_slots} slots each; at most {MAX_COPIES} slots in all")


def check_counts(smallest: int, total: int) -> None:
    """Raises `ConfigError` unless counts lie between 0 and what int32 holds, summed over ranks and experts."""
    if smallest < 0:
        raise ConfigError(f"a load of {smallest} tokens; counts of tokens cannot be negative")
    if total > INT32_MAX:
        raise ConfigError(f"{total} tokens in one load; at most {INT32_MAX}, since quotas are int32")
