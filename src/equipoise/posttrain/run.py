"""A whole post-training run in this process, and what is refused before it begins."""

from collections.abc import Sequence
from pathlib import Path

from equipoise.distributed.agree import together
from equipoise.distributed.world import World
from equipoise.errors import ConfigError
from equipoise.posttrain.prompts import load_problems
from equipoise.posttrain.rewards import load_reward
from equipoise.posttrain.trainer import PosttrainTrainer
from equipoise.train.config import TrainConfig
from equipoise.train.log import configure_logging
from equipoise.train.preflight import check_model
from equipoise.train.run import run_trainer
from equipoise.train.stop import StopSignals
from equipoise.train.trainer import Trainer


def check_settings(config: TrainConfig, world_size: int) -> None:
    """Raises ConfigError for settings that post-training on so many ranks cannot have; needs no process group."""
    settings, loop = config.posttrain, config.train
    if settings is None:
        raise ConfigError(
            "there is no section posttrain: give --posttrain for its defaults, or a recipe that has one, such as "
            "posttrain-demo"
        )
    if loop.global_batch_size % (settings.num_generations * settings.updates_per_step):
        raise ConfigError(
            f"train.global_batch_size is {loop.global_batch_size} answers, which is no multiple of "
            f"posttrain.num_generations {settings.num_generations} x posttrain.updates_per_step "
            f"{settings.updates_per_step}: change one of them"
        )
    if settings.max_new_tokens >= loop.sequence_length:
        raise ConfigError(
            f"posttrain.max_new_tokens is {settings.max_new_tokens} but train.sequence_length, which also holds the "
            f"prompt, is {loop.sequence_length}: lower the one or raise the other"
        )
    if config.model.num_experts % world_size:
        raise ConfigError(
            f"model.num_experts is {config.model.num_experts}, which the {world_size} processes of the engine cannot "
            "share evenly, whatever parallel.ep_size is: start a number of processes that divides it"
        )
    refused = {
        "model.num_nextn_predict_layers": config.model.num_nextn_predict_layers > 0,
        "synthetic_routing": config.synthetic_routing is not None,
        "parallel.dispatcher 'symmetric'": config.parallel.dispatcher == "symmetric",
        "balance.transport 'symmetric'": config.balance is not None and config.balance.transport == "symmetric",
        "trace together with posttrain.updates_per_step": config.trace is not None and settings.updates_per_step > 1,
    }
    for what, is_set in refused.items():
        if is_set:
            raise ConfigError(f"{what} cannot be combined with posttrain: leave it out")


def check_start(config: TrainConfig, num_workers: int, checkpoints: Path, resume_step: int | None) -> None:
    """Raises what a run of `num_workers` ranks on this host would find out: see `check_model`, `load_reward` and
    `load_problems`."""
    assert config.posttrain is not None
    if check_model(config, num_workers, checkpoints, resume_step):
        load_reward(config.posttrain.reward)
        load_problems(config)


def run_posttraining(
    config: TrainConfig,
    out: Path,
    argv: Sequence[str],
    resume: bool,
    typed: str = "",
    resume_step: int | None = None,
) -> None:
    """Post-trains `config`, which has the section posttrain, to the end in run folder `out`, or until a signal asks to
    stop, after saving. The arguments are those of `equipoise.train.run.run_training`."""
    configure_logging()
    settings = config.posttrain
    assert settings is not None

    def make(world: World, stop: StopSignals) -> Trainer:
        reward = together(lambda: load_reward(settings.reward), world)
        problems = together(lambda: load_problems(config), world)
        return PosttrainTrainer(config, world, problems, reward, out, stop)

    run_trainer(make, config, out, argv, resume, typed, resume_step)
