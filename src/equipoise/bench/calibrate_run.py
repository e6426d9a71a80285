"""Steps of a model under loads that are laid down, and the rates that explain their times.

Steps of all loads take turns, with a step of one reference load between them: a load's time is that of its step over
its two neighbours', times the median of the references. So a machine whose speed drifts meets all alike.

Shapes: P ranks of the EP group, E experts, M = E / P experts per rank, X features of the cost model.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from equipoise.accelerator import get_accelerator
from equipoise.bench.balance import FORCED, OFF, ON
from equipoise.bench.balance_run import Runner, Study, Switch
from equipoise.distributed.agree import gather_json
from equipoise.distributed.world import join_world
from equipoise.errors import ConfigError, EquipoiseError
from equipoise.files import written_whole
from equipoise.moe.synthetic import SyntheticRouting
from equipoise.simulate.cost import layer_work
from equipoise.simulate.hardware import ExpertSize, Hardware
from equipoise.simulate.loads import LoadBlock
from equipoise.simulate.run import plan_block
from equipoise.train.config import TrainConfig, plan_run
from equipoise.train.log import configure_logging
from equipoise.train.stop import StopSignals
from equipoise.train.trainer import Trainer, build_datasets

REFERENCE = "even"
NEGLIGIBLE = 1e-6
"""Share of a step that is no time at all."""


@dataclass(frozen=True)
class Load:
    """What the ranks of an EP group route in each of some steps, and in which mode.

    routings: by step, then by rank of the group.
    """

    name: str
    mode: str
    routings: Sequence[Sequence[SyntheticRouting]]

    def matrices(self, tokens: int) -> np.ndarray:
        """int32 [steps, P, E]: rows of each source rank for each expert."""
        return np.array([[r.expert_counts(tokens) for r in ranks] for ranks in self.routings], np.int32)


def check_study(config: TrainConfig, world_size: int) -> TrainConfig:
    """The configuration with balancing on and random tokens, checked before anything starts.

    Raises:
        ConfigError: an EP group of one rank, or more than one microbatch in a step.
    """
    study = study_of(config)
    config = study.prepare(config.model_copy(update={"trace": None}), world_size)
    plan = plan_run(config, world_size)
    if plan.axes.ep < 2:
        raise ConfigError("a calibration needs an EP group of at least 2 ranks: raise parallel.ep_size")
    if plan.accumulation_steps != 1:
        raise ConfigError(
            f"a step has {plan.accumulation_steps} microbatches; a calibration takes one: leave "
            "train.micro_batch_size out, and lower train.global_batch_size instead"
        )
    return config


def study_of(config: TrainConfig) -> Study:
    """What `Runner` and the checks need to know."""
    return Study((OFF, ON), (), 1.0, "", layer=False, steps=1, rounds=1, run_dir=None, out=Path())


def calibration_loads(num_ranks: int, num_experts: int, top_k: int) -> list[Load]:
    """Loads that tell the parts of the cost model apart. The first is the reference."""
    P, E, K = num_ranks, num_experts, top_k
    M = E // P

    def one(name: str, mode: str, shares: Sequence[Sequence[float]], first: float = 1.0, last: float = 1.0) -> Load:
        """`first`, `last`: share of real tokens of all ranks but the last, and of the last."""
        parts = [first] * (P - 1) + [last]
        return Load(name, mode, [[SyntheticRouting(tuple(shares[p]), K, P, p, parts[p]) for p in range(P)]])

    def same(rank_shares: Sequence[float], used: int = M) -> list[list[float]]:
        """Every source alike: a rank's share over the first `used` of its experts."""
        return [[share / used if m < used else 0.0 for share in rank_shares for m in range(M)]] * P

    def hot(ratio: float) -> list[float]:
        return [ratio / P] + [(P - ratio) / (P * (P - 1))] * (P - 1)

    even = [1 / P] * P
    largest = min(P, E / K)
    mild, medium, strong = (1 + part * (largest - 1) for part in (0.3, 0.5, 0.7))
    loads = [
        one(REFERENCE, OFF, same(even)),
        one("no rows", OFF, same(even), 0.0, 0.0),
        one("half the rows", OFF, same(even), 0.5, 0.5),
        one("few tokens of the last rank", OFF, same(even), last=0.4),
        one("hot rank, mild", OFF, same(hot(mild))),
        one("hot rank, strong", OFF, same(hot(strong))),
        one("even, planned", ON, same(even)),
        one("hot rank, mild, planned", ON, same(hot(mild))),
        one("hot rank, medium, planned", ON, same(hot(medium))),
        one("hot rank, strong, planned", ON, same(hot(strong))),
    ]
    few = max(1, -(-K // P), M // 2)
    if few < M:
        loads.append(one("few experts", OFF, same(even, few)))
    if K <= M:
        for name, shift in (("rows stay", 0), ("rows leave", 1)):
            shares = [[1 / M if e // M == (p + shift) % P else 0.0 for e in range(E)] for p in range(P)]
            loads.append(one(name, OFF, shares))
    return loads


class Stopwatch:
    """Times steps of loads on all ranks. Every method is collective."""

    def __init__(self, trainer: Trainer, study: Study) -> None:
        self.trainer, self.switch, self.runner = trainer, Switch(trainer), Runner(trainer, study)
        self.rank = trainer.meshes.ep.get_local_rank()

    def run(self, load: Load, step: int) -> float:
        """Seconds of one step on the slowest rank. `forced` is `off` with what was laid down."""
        trainer, world = self.trainer, self.trainer.world
        self.switch.set(OFF if load.mode == FORCED else load.mode)
        self.switch.lay_down(load.routings[step][self.rank])
        dist.barrier(group=trainer.meshes.world_group)
        world.accelerator.synchronize()
        started = time.perf_counter()
        self.runner.run(step)
        world.accelerator.synchronize()
        seconds = time.perf_counter() - started
        self.switch.lay_down(None)
        return max(gather_json(seconds, world))

    def turns(self, loads: Sequence[Load], rounds: int, deadline_s: float = float("inf")) -> dict[str, list[float]]:
        """Seconds of each load, one for each round: the mean over its steps, in the speed of the whole measurement.

        Rounds go forth and back through the loads, and end early when the next would pass the deadline.
        """
        reference = loads[0]
        for mode in dict.fromkeys(load.mode for load in loads):  # buffers are made, code is read
            self.run(next(load for load in reversed(loads) if load.mode == mode), 0)
        references: list[float] = []
        found: dict[str, list[float]] = {load.name: [] for load in loads}
        started = time.perf_counter()
        for number in range(rounds):
            began = time.perf_counter()
            references.append(self.run(reference, 0))
            for load in loads if number % 2 == 0 else reversed(loads):
                steps = [self.run(load, step) for step in range(len(load.routings))]
                references.append(self.run(reference, 0))
                found[load.name].append(statistics.fmean(steps) / statistics.fmean(references[-2:]))
            now = time.perf_counter()
            is_late = gather_json(now - started + (now - began) > deadline_s, self.trainer.world)[0]
            if is_late:
                break
        speed = statistics.median(references)
        return {name: [ratio * speed for ratio in ratios] for name, ratios in found.items()}


def middle_mean(values: Sequence[float]) -> float:
    """Mean without the lowest and the highest quarter: as steady as a mean, and outliers count as little as in a
    median."""
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def fit_hardware(
    loads: Sequence[Load], seconds: dict[str, float], config: TrainConfig, world_size: int, base: Hardware
) -> Hardware:
    """The non-negative rates whose predictions of the loads' steps are best, by relative squares.

    base: name, source, tiles and duplex of the result (`unfitted`).

    Raises:
        EquipoiseError: scipy is missing.
    """
    try:
        from scipy.optimize import nnls
    except ImportError as error:
        raise EquipoiseError("a calibration needs scipy: pip install 'equipoise[bench]'") from error
    expert, tokens = expert_size(config), tokens_per_rank(config, world_size)
    times = np.array([seconds[load.name] for load in loads])
    # The rank that computes longest depends on the rates: refined once they are known.
    hardware = base
    for _ in range(3):
        table = np.array([features(load, config, tokens, hardware, expert).mean(0) for load in loads])
        scale = np.maximum(table.max(0), 1e-300)
        weights, _ = nnls(table / scale / times[:, None], np.ones(len(loads)))
        weights[weights < NEGLIGIBLE * times.min()] = 0  # seconds of each part at most, here by rounding alone
        flops, shared, expert_s, source_rate, link, balance, copy, rest = weights / scale
        hardware = replace(
            base,
            flops_per_s=_rate(flops),
            shared_flops_per_s=_rate(shared),
            expert_s=float(expert_s),
            source_bytes_per_s=_rate(source_rate),
            link_bytes_per_s=_rate(link),
            far_bytes_per_s=_rate(link),
            balance_s=float(balance),
            copy_bytes_per_s=_rate(copy),
            rest_s=float(rest),
        )
    return hardware


def unfitted(name: str, source: str, on_cpu: bool) -> Hardware:
    """What a fit begins with. A CPU's cores copy themselves what they send and receive, and compute any number of rows;
    a GPU does both at once, in tiles."""
    return Hardware(name, source, flops_per_s=1.0, full_duplex=not on_cpu, tile_rows=1 if on_cpu else 128)


def _rate(seconds_per_unit: float) -> float:
    return float(1 / seconds_per_unit) if seconds_per_unit > 1e-30 else float("inf")


def features(load: Load, config: TrainConfig, tokens: int, hardware: Hardware, expert: ExpertSize) -> np.ndarray:
    """[steps, X]: what the rates are multiplied with, in the order of `fit_hardware`."""
    work = layer_work(hardware, expert, plan_block(*_planned(load, config, tokens)))
    moved, copied = work.near_bytes + work.far_bytes, work.copies * expert.copy_bytes
    table = np.stack([work.flop, work.mean_flop, work.active, work.source_bytes, moved, work.planned, copied], 1)
    return np.concatenate([num_moe_layers(config) * table, np.ones((len(table), 1))], 1)


def predict(load: Load, config: TrainConfig, tokens: int, hardware: Hardware) -> float:
    """Seconds of a load's step, the mean over its steps."""
    rates = [
        *(1 / hardware.flops_per_s, 1 / hardware.shared_flops_per_s, hardware.expert_s),
        *(1 / hardware.source_bytes_per_s, 1 / hardware.link_bytes_per_s),
        *(hardware.balance_s, 1 / hardware.copy_bytes_per_s, hardware.rest_s),
    ]
    return float((features(load, config, tokens, hardware, expert_size(config)) @ np.array(rates)).mean())


def _planned(load: Load, config: TrainConfig, tokens: int):
    from equipoise.balance.config import planner_settings

    assert config.balance is not None
    block = LoadBlock(0, 0, np.arange(len(load.routings)), load.matrices(tokens))
    planner = {OFF: "off", FORCED: "off", ON: config.balance.planner}[load.mode]
    return block, planner, planner_settings(config.balance)


def num_moe_layers(config: TrainConfig) -> int:
    return len(config.model.moe_layers)


def expert_size(config: TrainConfig) -> ExpertSize:
    itemsize = 4 if config.train.precision == "float32" else torch.empty(0, dtype=_dtype(config)).itemsize
    return ExpertSize(config.model.hidden_size, config.model.moe_intermediate_size, itemsize)


def _dtype(config: TrainConfig) -> torch.dtype:
    if config.train.precision == "auto":
        accelerator = get_accelerator()
        on_device = accelerator.device().type != "cpu" and bool(accelerator.supports("bf16"))
        return torch.bfloat16 if on_device else torch.float32
    return torch.bfloat16


def tokens_per_rank(config: TrainConfig, world_size: int) -> int:
    return config.train.global_batch_size // world_size * config.train.sequence_length


def run_calibration(config: TrainConfig, rounds: int, out: Path) -> None:
    """Measures and, on rank 0, writes the file. Collective."""
    configure_logging()
    with StopSignals() as stop, join_world(get_accelerator(), config.parallel.timeout_s) as world:
        datasets = build_datasets(config, world)
        trainer = Trainer(config, world, datasets, out.parent, stop)
        try:
            plan, model = trainer.plan, config.model
            loads = calibration_loads(plan.axes.ep, model.num_experts, model.num_experts_per_tok)
            with world.operation("calibration", deadline_s=100 * world.timeout_s):
                measured = Stopwatch(trainer, study_of(config)).turns(loads, rounds)
        finally:
            trainer.loader.close()
        if world.rank == 0:
            seconds = {name: middle_mean(values) for name, values in measured.items()}
            device = world.accelerator.device_name()
            source = f"measured on {world.size} x {device} by `equipoise bench calibrate`"
            base = unfitted(out.stem, source, world.device.type == "cpu")
            hardware = replace(
                fit_hardware(loads, seconds, config, world.size, base),
                measured_with=describe_sizes(config, plan.axes.ep),
            )
            _say(loads, seconds, config, world.size, hardware)
            check_fit(hardware)
            _write(out, hardware)
            print(f"written to {out}")


def describe_sizes(config: TrainConfig, ep_size: int) -> str:
    model, loop = config.model, config.train
    return (
        f"EP {ep_size}, {num_moe_layers(config)} MoE layers, hidden {model.hidden_size}, intermediate "
        f"{model.moe_intermediate_size}, {model.num_experts} experts, top {model.num_experts_per_tok}, "
        f"{loop.global_batch_size} sequences of {loop.sequence_length} tokens"
    )


def check_fit(hardware: Hardware) -> None:
    """Raises EquipoiseError for rates of which nothing follows: in the measured steps experts cost no time."""
    if math.isinf(hardware.flops_per_s) and math.isinf(hardware.shared_flops_per_s):
        raise EquipoiseError(
            f"the measured steps ({hardware.measured_with}) do not show what the experts' products cost, so nothing "
            "was written: their time is lost in the rest of the step, or in what else the machine did. Take larger "
            "experts or more tokens, more --rounds, and a machine that does nothing else"
        )


def _write(path: Path, hardware: Hardware) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as partial:
            partial.write_text(hardware.to_json())
    except OSError as error:
        raise EquipoiseError(f"cannot write {path}: {error.strerror or error}; choose another --out") from error


def _say(
    loads: Sequence[Load],
    seconds: dict[str, float],
    config: TrainConfig,
    world_size: int,
    hardware: Hardware,
) -> None:
    tokens = tokens_per_rank(config, world_size)
    for load in loads:
        predicted, measured = predict(load, config, tokens, hardware), seconds[load.name]
        print(
            f"{load.name:28} {measured * 1e3:9.2f} ms, fitted {predicted * 1e3:9.2f} ms {predicted / measured - 1:+.1%}"
        )
