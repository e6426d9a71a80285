"""Settings of the symmetric dispatcher."""

from typing import Literal

from pydantic import Field

from equipoise.config import Config


class DispatchConfig(Config):
    """How the symmetric dispatcher sizes its buffers. Others have none."""

    capacity_factor: float = Field(2.0, ge=1)
    """Rows that a rank can receive in one dispatch, over those of an even load. A balanced load comes close to 1; what
    exceeds the buffers is an error, never lost."""
    overflow: Literal["auto", "error", "worst_case"] = "auto"
    """What bounds the buffers: capacity_factor (error), or every token going to one rank (worst_case, ep_size times the
    rows of an even load). auto is error with balancing and worst_case without."""
    num_buffers: int = Field(0, ge=0)
    """Pieces of memory for rows, of which there is one more than this: one for each MoE layer whose backward waits for
    them (with fewer, rows are copied), and two for the exchange under way. 0 takes as many as the layers and recompute
    ask for."""
    weighs_rows: bool | None = None
    """Whether tokens' weights go along with them, experts multiply by these, and an expert's rank adds up a token's
    rows before they come back. Less goes over the link, and kernel triton need not keep outputs for the weights'
    gradients (tokens x top_k x hidden_size elements of each MoE layer). With false, sums are those of all_to_all bit
    for bit; with true they are rounded once more. Unset: true, unless parallel.domain_size divides the EP group."""

    def factor(self, is_balanced: bool) -> float:
        """`capacity_factor` of the dispatcher; 0 is the worst case."""
        bounded = is_balanced if self.overflow == "auto" else self.overflow == "error"
        return self.capacity_factor if bounded else 0.0

    def weighs(self, is_one_domain: bool) -> bool:
        """`weighs_rows` of the dispatcher. `is_one_domain`: it reaches all ranks of the EP group."""
        return is_one_domain if self.weighs_rows is None else self.weighs_rows
