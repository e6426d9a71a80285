"""Settings of exact-load expert balancing. Apart from the package `balance`, which is imported only when it is on."""

from typing import Literal

from pydantic import Field, PositiveInt

from equipoise.config import Config


class BalanceConfig(Config):
    """Exact-load expert balancing: busy experts get replicas on other ranks, anew for each layer and microbatch."""

    num_redundant_experts_per_rank: PositiveInt = 1
    """Replica slots per rank, shared by all layers. Each holds one expert's weights and its FP32 gradients."""
    tolerance: float = Field(0.01, ge=0, le=1000)
    """Share of the mean rank load by which the busiest rank may exceed it before anything is moved; 0.01 is 1 %."""
    min_tokens: PositiveInt = 1
    """No replica gets fewer tokens than this."""
    domain_size: int = Field(0, ge=0)
    """Replicas stay within groups of this many consecutive ranks of the EP group (those joined by a fast link); 0 puts
    no limit."""
    copy_tokens: int = Field(0, ge=0)
    """Time of one weight copy, in tokens that an expert computes in the same time: a plan has to save more than it
    costs. 0 takes copies as free."""
    planner: str = "exact_load"
    """Planner by name, or your own as my_file.py:function."""
    reduction_rows: PositiveInt = 4
    """FP32 expert gradients that a rank receives at once; more arrive in rounds. Bounds the memory of the reduction of
    the collective transport."""
    transport: Literal["auto", "collective", "symmetric"] = "auto"
    """How weights and gradients of replicas move: by messages of the process group, for which the host waits for the
    load, or by kernels in memory that the ranks share, for which it never waits. auto is symmetric with the dispatcher
    symmetric, else collective: whole training runs have been measured with messages only. In an EP group of several
    domains (parallel.domain_size) replicas within them go through memory, the others as messages."""

    def uses_space(self, dispatcher: str, ep_size: int, domain: int) -> bool:
        """Whether weights and gradients of replicas go through symmetric memory, where there is some: of the whole EP
        group, by plans of the device, or of its domains of `domain` ranks, by plans of the host."""
        if self.transport != "auto":
            return self.transport == "symmetric"
        return dispatcher in ("auto", "symmetric") and (self.planner == "exact_load" or domain < ep_size)
