"""Saving and resuming the whole training state: the public names. docs/checkpoints.md has layout and guarantees."""

from equipoise.checkpoint.resume import choose_checkpoint, find_latest, load_checkpoint, refuse_existing
from equipoise.checkpoint.saver import CheckpointSaver, save_checkpoint
from equipoise.checkpoint.state import RestoredMeta, TrainingState

__all__ = [
    "CheckpointSaver",
    "RestoredMeta",
    "TrainingState",
    "choose_checkpoint",
    "find_latest",
    "load_checkpoint",
    "refuse_existing",
    "save_checkpoint",
]
