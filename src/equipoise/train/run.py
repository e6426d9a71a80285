"""A whole training run in this process, which is one rank of the world that its launcher describes."""

from collections.abc import Sequence
from pathlib import Path

from equipoise.accelerator import get_accelerator
from equipoise.data import build_dataset
from equipoise.distributed.agree import raise_together
from equipoise.distributed.world import join_world
from equipoise.train.config import TrainConfig
from equipoise.train.log import configure_logging
from equipoise.train.resolved import save_resolved
from equipoise.train.stop import StopSignals
from equipoise.train.trainer import Trainer


def run_training(config: TrainConfig, out: Path, argv: Sequence[str], resume: bool) -> None:
    """Trains `config` to the end in run folder `out`, or until a signal asks to stop, after saving.

    Args:
        config: checked settings.
        out: run folder, the same on every rank; gets `config.toml`, `run.json`, `metrics.jsonl`, `checkpoints/`.
        argv: the command, for `run.json`.
        resume: continue from the newest complete checkpoint in `out`, if there is one.
    """
    configure_logging()
    loop = config.train
    datasets = build_dataset(config.data, loop.sequence_length, vocab_size=config.model.vocab_size, seed=loop.seed)
    with StopSignals() as stop, join_world(get_accelerator(), config.parallel.timeout_s) as world:
        error: Exception | None = None
        if world.rank == 0:
            try:
                save_resolved(config, out, argv)
            except Exception as e:
                error = e
        raise_together(error, world)
        Trainer(config, world, datasets, out, stop, resume).run()
