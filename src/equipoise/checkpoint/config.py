"""Settings of training checkpoints."""

from pydantic import Field

from equipoise.config import Config


class CheckpointConfig(Config):
    """When the training state is saved, how many saves are kept, and whether a run continues from one."""

    every: int = Field(default=0, ge=0)
    """Save after every so many optimizer steps. 0 saves only at the end, which is always done."""

    keep_last: int = Field(default=2, ge=0)
    """Newest complete checkpoints kept; older ones are deleted once a new one is complete. 0 keeps all."""

    resume: bool = False
    """Continue from the newest complete checkpoint of the run folder; with none there, start at step 0."""
