"""Settings of load traces."""

from pydantic import Field, PositiveInt, model_validator

from equipoise.config import Config


class TraceConfig(Config):
    """Load traces: how many rows each rank had to compute, layer by layer, in trace/ of the run folder."""

    every: PositiveInt = 10
    """Optimizer steps between recorded steps; a recorded step keeps every rank's load before and after balancing, and
    the time of each layer's phases."""
    matrices_every: int = Field(100, ge=0)
    """Steps between those recorded with matrices (rows of each rank for each expert, and plans); a multiple of every, 0
    for never."""
    sequences_every: int = Field(0, ge=0)
    """Steps between those recorded with each sequence's experts, so that other numbers of ranks can be simulated; a
    multiple of every, 0 for never."""

    @model_validator(mode="after")
    def _check(self) -> "TraceConfig":
        for name in ("matrices_every", "sequences_every"):
            if getattr(self, name) % self.every:
                raise ValueError(
                    f"trace.{name} is {getattr(self, name)}, which is no multiple of trace.every {self.every}: choose "
                    f"{max(1, round(getattr(self, name) / self.every)) * self.every}, or 0 for never"
                )
        return self
