"""The root of the configuration tree, and the checks that need more than one section."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from equipoise.accelerator import get_accelerator
from equipoise.balance_config import BalanceConfig
from equipoise.checkpoint.config import CheckpointConfig
from equipoise.checkpoint.hf.mapping import HFMapping
from equipoise.config import Config
from equipoise.data.config import DataConfig
from equipoise.dispatch.config import DispatchConfig
from equipoise.distributed.mesh import AxisSizes, ParallelConfig, derive_axes
from equipoise.errors import CheckpointError, ConfigError
from equipoise.models.config import ModelConfig
from equipoise.moe.synthetic import SyntheticRoutingConfig, Workload
from equipoise.observe.config import TraceConfig
from equipoise.observe.profiler import ProfilerConfig, check_ranks
from equipoise.posttrain_config import PosttrainConfig
from equipoise.train.metrics import MetricsConfig, refuse_missing_packages
from equipoise.train.optimizer import OptimizerConfig
from equipoise.train.pretrained import with_pretrained


class LoopConfig(Config):
    """The training loop."""

    steps: PositiveInt = 100
    """Optimizer steps of the whole run."""
    global_batch_size: PositiveInt = 16
    """Sequences per optimizer step over all ranks. The same number gives the same training at any world size,
    but for a balance loss of scope micro_batch (model.router_aux_loss_scope), which sees one microbatch at a time."""
    micro_batch_size: PositiveInt | Literal["auto"] | None = None
    """Sequences per forward on one rank; none takes the rank's whole share at once (no gradient accumulation), auto as
    much of it as is at most 2048 tokens on a CPU or 32768 on an accelerator, and divides it."""
    sequence_length: PositiveInt = 256
    """Tokens per sequence."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the initial weights and of the data order."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; master weights are FP32 either way. auto is bfloat16 on an accelerator that has it, otherwise
    float32."""
    recompute: Literal["none", "full", "selective"] = "none"
    """Activations run again in backward to save memory: full keeps only layer inputs and routing decisions,
    selective also keeps attention and dense products."""
    compile: bool = False
    """Compiles attention and dense feed-forward parts with torch.compile."""
    cuda_graph: bool = False
    """Captures a microbatch's forward and backward once and replays it in one launch, so that a small model does not
    wait for the host. On one rank that keeps its weights, with expert kernel triton; elsewhere it has no effect, and
    the start says why."""
    expert_kernel: Literal["auto", "loop", "grouped_mm", "triton"] = "auto"
    """Implementation of the experts' products; auto probes the device and says what it chose."""
    eval_every: int = Field(0, ge=0)
    """Evaluate on held-out sequences every n steps, and at the end; 0 evaluates at the end only."""
    eval_sequences: PositiveInt = 64
    """Held-out sequences per evaluation."""


class TrainConfig(Config):
    """Everything that defines a training run except the world size, which the launcher gives."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    dispatch: DispatchConfig = DispatchConfig()
    train: LoopConfig = LoopConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    balance: BalanceConfig | None = None
    synthetic_routing: SyntheticRoutingConfig | None = None
    trace: TraceConfig | None = None
    profiler: ProfilerConfig | None = None
    posttrain: PosttrainConfig | None = None
    save_hf: bool = False
    """At the end also writes the model as a Hugging Face folder, `hf` in the run folder, in the dtype of the weights
    that it started from (model.load_from) or else in FP32."""

    @model_validator(mode="before")
    @classmethod
    def _pretrained(cls, values: Any) -> Any:
        return with_pretrained(values)

    @model_validator(mode="after")
    def _has_a_family(self) -> Self:
        if self.save_hf:
            try:
                HFMapping(self.model)
            except CheckpointError as error:
                raise ValueError(f"save_hf is set, but {error}") from error
        return self

    def check_world(self, world_size: int) -> None:
        """Raises ConfigError when these settings cannot run on `world_size` ranks; needs no process group."""
        plan_run(self, world_size)
        refuse_missing_packages(self.metrics)

    def check_start(self, num_workers: int, checkpoints: Path, resume_step: int | None) -> None:
        """Raises what `num_workers` ranks on this host would find out together, as far as that is known without
        them: see `train/preflight.py`."""
        from equipoise.train.preflight import check_start

        check_start(self, num_workers, checkpoints, resume_step)


@dataclass(frozen=True)
class RunPlan:
    """What a configuration means for a world size."""

    axes: AxisSizes
    micro_batch_size: int
    accumulation_steps: int


def plan_run(config: TrainConfig, world_size: int) -> RunPlan:
    """Checks the settings against each other and the world size; needs no process group.

    Raises:
        ConfigError: an impossible combination; names the keys, the values and what would be valid.
    """
    axes = derive_axes(config.parallel, world_size, config.model.num_experts)
    loop, model = config.train, config.model
    if config.parallel.dispatcher == "local" and axes.ep > 1:
        raise ConfigError(
            f"parallel.dispatcher is 'local' but parallel.ep_size is {axes.ep}: choose all_to_all, all_gather or auto"
        )
    if config.parallel.dispatcher in ("symmetric", "deepep") and axes.ep == 1:
        raise ConfigError(
            f"parallel.dispatcher is {config.parallel.dispatcher!r} but parallel.ep_size is 1: there is no other "
            "rank to send rows to. Choose auto or local, or a larger ep_size"
        )
    if config.dispatch.weighs_rows and axes.domain < axes.ep:
        raise ConfigError(
            f"dispatch.weighs_rows is true but parallel.domain_size {axes.domain} is smaller than parallel.ep_size "
            f"{axes.ep}: rows between domains go as messages, which carry no weights. Set one of the two to its default"
        )
    if config.balance is not None:
        _check_balance(config.balance, axes)
    synthetic_workload(config, axes)
    if config.profiler is not None:
        check_ranks(config.profiler, world_size)
    if loop.sequence_length > model.max_position_embeddings:
        raise ConfigError(
            f"train.sequence_length is {loop.sequence_length}, longer than model.max_position_embeddings "
            f"{model.max_position_embeddings}: shorten the one or raise the other"
        )
    if loop.sequence_length <= model.num_nextn_predict_layers:
        raise ConfigError(
            f"model.num_nextn_predict_layers is {model.num_nextn_predict_layers} but train.sequence_length is "
            f"{loop.sequence_length}: the last of these layers would have nothing to predict. Choose at most "
            f"{loop.sequence_length - 1}, or longer sequences"
        )
    if loop.global_batch_size % world_size:
        low = max(1, loop.global_batch_size // world_size) * world_size
        raise ConfigError(
            f"train.global_batch_size is {loop.global_batch_size} sequences, which the {world_size} ranks cannot share "
            f"evenly: choose a multiple of {world_size}, such as {low}"
        )
    share = loop.global_batch_size // world_size
    micro = _auto_micro_batch(share, loop) if loop.micro_batch_size == "auto" else loop.micro_batch_size or share
    if share % micro:
        valid = [d for d in range(1, share + 1) if share % d == 0]
        raise ConfigError(
            f"train.micro_batch_size is {micro}, which does not divide the {share} sequences of each rank "
            f"(train.global_batch_size {loop.global_batch_size} / world size {world_size}): choose one of {valid}"
        )
    return RunPlan(axes, micro, share // micro)


def _auto_micro_batch(share: int, loop: LoopConfig) -> int:
    """Sequences of a microbatch: on an accelerator enough that the host can keep it busy, on a CPU few that fit its
    caches and a laptop's memory."""
    most_tokens = 2048 if get_accelerator().device_type == "cpu" else 32768
    fitting = [size for size in range(1, share + 1) if share % size == 0 and size * loop.sequence_length <= most_tokens]
    return max(fitting, default=1)


def synthetic_workload(config: TrainConfig, axes: AxisSizes) -> Workload | None:
    """What `synthetic_routing` means for these sizes; None when routing is learned.

    Raises:
        ConfigError: an imbalance that these sizes cannot have.
    """
    chosen, model = config.synthetic_routing, config.model
    if chosen is None:
        return None
    try:
        return Workload(chosen.workload, chosen.imbalance, model.num_experts, model.num_experts_per_tok, axes.ep)
    except ConfigError as error:
        raise ConfigError(f"synthetic_routing: {error}") from error


def _check_balance(balance: BalanceConfig, axes: AxisSizes) -> None:
    """Raises ConfigError for what balancing cannot be combined with."""
    if axes.ep == 1:
        raise ConfigError(
            "balance is set but parallel.ep_size is 1: there are no other ranks to balance with. Choose a larger "
            "parallel.ep_size, or leave the balance section out"
        )
    if balance.domain_size and axes.ep % balance.domain_size:
        raise ConfigError(
            f"balance.domain_size is {balance.domain_size}, which does not divide parallel.ep_size {axes.ep}: choose "
            f"one of {[d for d in range(1, axes.ep + 1) if axes.ep % d == 0]}, or 0 for no limit"
        )
    from equipoise.balance.registry import planner_maker  # the package is imported only when balancing is on

    try:
        planner_maker(balance.planner)
    except ConfigError as error:
        raise ConfigError(f"balance.planner: {error}") from error
    if balance.transport == "symmetric" and axes.domain == axes.ep and balance.planner != "exact_load":
        raise ConfigError(
            f"balance.transport is 'symmetric' but balance.planner is {balance.planner!r}, which plans on the host: "
            "choose planner exact_load, or transport auto or collective"
        )
