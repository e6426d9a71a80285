"""Settings of training checkpoints."""

from pydantic import Field

from equipoise.config import Config


class CheckpointConfig(Config):
    """When the training state is saved, how, and which saves are kept."""

    every: int = Field(default=0, ge=0)
    """Save after every so many optimizer steps. 0 saves only at the end, which is always done."""

    async_save: bool = True
    """Training goes on while a checkpoint is written. Takes host memory of the size of a rank's share of the state,
    pinned where there is a device. The save at the end and after a signal is waited for either way."""

    keep_last: int = Field(default=2, ge=0)
    """Newest complete checkpoints kept; older ones are deleted once a new one is complete. 0 keeps all."""

    keep_every: int = Field(default=0, ge=0)
    """Checkpoints of steps that are a multiple of this are kept for good, besides keep_last. 0 keeps none so."""

    verify: bool = True
    """Compare the checksums of a checkpoint's files before resuming; a damaged checkpoint is passed over. Ranks share
    the reading."""

    allow_other_model: bool = False
    """Resume although settings of the model that leave its shapes alone, such as num_experts_per_tok, are not those
    that were saved."""
