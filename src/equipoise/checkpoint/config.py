"""Settings of training checkpoints."""

from pydantic import Field

from equipoise.config import Config


class CheckpointConfig(Config):
    """When the training state is saved and how many saves are kept."""

    every: int = Field(default=0, ge=0)
    """Save after every so many optimizer steps. 0 saves only at the end, which is always done."""

    allow_other_model: bool = False
    """Resume although settings of the model that leave its shapes alone, such as num_experts_per_tok, are not those
    that were saved."""

    keep_last: int = Field(default=2, ge=0)
    """Newest complete checkpoints kept; older ones are deleted once a new one is complete. 0 keeps all."""
