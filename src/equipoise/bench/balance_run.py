"""The measurement behind `equipoise bench balance`, on one rank.

One model serves all modes: balancing is switched on and off by giving its MoE layers other dispatchers and balancers,
so the weights, the batches and the machine are the same, and modes take turns round by round. Steps run with a
learning rate of 0.

Shapes: T tokens, D features, P ranks of the EP group.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from equipoise.accelerator import get_accelerator
from equipoise.balance.cost import break_even_imbalance
from equipoise.balance_config import BalanceConfig
from equipoise.bench.advice import measure_copy_tokens, slots_for
from equipoise.bench.balance import FORCED, NATURAL, OFF, ON
from equipoise.bench.results import write_results
from equipoise.data import DataConfig
from equipoise.dispatch import build_dispatcher
from equipoise.dispatch.base import AnyExchange, Dispatched, Dispatcher
from equipoise.distributed.agree import gather_json
from equipoise.distributed.world import World, join_world
from equipoise.errors import ConfigError
from equipoise.models.layer import DecoderLayer
from equipoise.models.rotary import rotary_tables
from equipoise.moe.layer import MoELayer
from equipoise.moe.synthetic import WORKLOADS, SyntheticRouting, Workload
from equipoise.train.config import TrainConfig, plan_run
from equipoise.train.log import configure_logging
from equipoise.train.step import moe_layers
from equipoise.train.stop import StopSignals
from equipoise.train.trainer import Trainer, build_datasets

if TYPE_CHECKING:
    from equipoise.balance import Balancer
    from equipoise.moe.balancing import ExpertBalancing

WARM_UP = 1
HEADINGS = (
    *("workload", "mode", "ms", "tokens/s", "of ceiling", "routed", "planned", "delivered", "remote"),
    *("copies", "MiB", "peak MiB"),
)
TABLE_WIDTH = 125
NOISE = 0.05
"""Relative difference of step times that says nothing."""


@dataclass(frozen=True)
class Study:
    """What to compare. `slots` is a number, `advise`, or empty for the configuration's."""

    modes: tuple[str, ...]
    workloads: tuple[str, ...]
    imbalance: float
    slots: int | str
    layer: bool
    steps: int
    rounds: int
    run_dir: Path | None
    out: Path

    def prepare(self, config: TrainConfig, world_size: int) -> TrainConfig:
        """The configuration with balancing on, checked against the study and the world, before anything starts.

        Raises:
            ConfigError: sizes, modes, workloads or an imbalance that cannot be.
        """
        from equipoise.balance import planner_maker

        self._check_names()
        axes = plan_run(config.model_copy(update={"synthetic_routing": None}), world_size).axes
        balance = config.balance or BalanceConfig()
        if isinstance(self.slots, int):
            balance = balance.model_copy(update={"num_redundant_experts_per_rank": self.slots})
        changes: dict[str, Any] = {"balance": balance, "synthetic_routing": None}
        if self.run_dir is None:
            changes["data"] = DataConfig(source="random", eval_fraction=0.0)
        config = config.model_copy(update=changes)
        config.check_world(world_size)
        for mode in self.modes:
            if mode not in (OFF, ON, FORCED):
                planner_maker(mode)
        if self.workloads == ("all",) and self.imbalance > axes.ep:
            raise ConfigError(
                f"--imbalance is {self.imbalance}; the largest over the mean of {axes.ep} ranks' loads is at most "
                f"{axes.ep}: choose 1 to {axes.ep}"
            )
        for name in self.all_workloads:
            if name != NATURAL:
                self.workload(name, config, axes.ep)
        return config

    def _check_names(self) -> None:
        from equipoise.balance.registry import PLANNERS

        for mode in self.modes:
            if mode not in (OFF, ON, FORCED, *PLANNERS) and ".py:" not in mode:
                raise ConfigError(
                    f"--modes: there is no mode or planner {mode!r}: choose {OFF}, {ON}, {FORCED}, a planner "
                    f"({', '.join(PLANNERS)}), or your own as my_file.py:function"
                )
        for name in self.all_workloads:
            if name not in (NATURAL, *WORKLOADS):
                raise ConfigError(
                    f"--workloads: there is no workload {name!r}: choose some of {NATURAL}, {', '.join(WORKLOADS)}, or "
                    "`all` alone"
                )

    @property
    def all_workloads(self) -> tuple[str, ...]:
        return (NATURAL, *WORKLOADS) if self.workloads == ("all",) else self.workloads

    def workload(self, name: str, config: TrainConfig, ep_size: int) -> Workload:
        """A workload for a model; with `all`, its imbalance is lowered to what these sizes can have."""
        make = partial(
            Workload, name, num_experts=config.model.num_experts, num_ranks=ep_size,
            num_experts_per_tok=config.model.num_experts_per_tok,
        )  # fmt: skip
        if self.workloads != ("all",):
            return make(imbalance=self.imbalance)
        return make(imbalance=min(self.imbalance, make(imbalance=1.0).largest_imbalance))


class CountingDispatcher:
    """A dispatcher that remembers how many rows arrived each time, and in `sent_P`, while that is a tensor, how many
    went to each rank."""

    def __init__(self, inner: Dispatcher) -> None:
        self.inner, self.num_local_experts = inner, inner.num_local_experts
        self.arrived: list[torch.Tensor] = []
        self.sent_P: torch.Tensor | None = None

    def dispatch(
        self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, exchange: AnyExchange = None
    ) -> Dispatched:
        if self.sent_P is not None:
            ranks = ids_TK.flatten().long() // self.num_local_experts  # -1 goes nowhere
            self.sent_P.index_add_(0, ranks.clamp(min=0), (ranks >= 0).to(self.sent_P.dtype))
        result = self.inner.dispatch(x_TD, ids_TK, weights_TK, exchange)
        self.arrived.append(result.counts_M.sum())
        return result

    def combine(self, rows_RD: torch.Tensor, handle: Any) -> torch.Tensor:
        return self.inner.combine(rows_RD, handle)


class Switch:
    """Gives a model's MoE layers one mode's dispatcher and balancing."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.layers: list[MoELayer] = moe_layers(trainer.model)
        built = [layer.balancing for layer in self.layers]
        assert all(built), "built with balancing on"
        self._balancing: dict[str, list[ExpertBalancing]] = {ON: [b for b in built if b is not None]}
        self._dispatchers: dict[str, CountingDispatcher] = {ON: CountingDispatcher(self.layers[0].dispatcher)}
        config = trainer.config
        chosen, space = config.parallel.dispatcher, trainer.model.symmetric_space
        options: dict[str, float] = {}
        if space is not None and chosen in ("auto", "symmetric"):
            kept = len(self.layers) if config.train.recompute == "none" else 1
            options = {"capacity_factor": 0, "num_buffers": config.dispatch.num_buffers or kept + 1}
            axes = trainer.plan.axes
            options["weighs_rows"] = config.dispatch.weighs(axes.domain == axes.ep)
        plain = build_dispatcher(chosen, config.model.num_experts, trainer.meshes.ep, space, **options)
        self._dispatchers[OFF] = CountingDispatcher(plain)

    def _balancing_of(self, mode: str) -> "list[ExpertBalancing]":
        if mode not in self._balancing:
            from equipoise.balance import Balancer
            from equipoise.moe.balancing import ExpertBalancing, expert_shapes

            trainer, model = self.trainer, self.trainer.config.model
            shapes = expert_shapes(model.hidden_size, model.moe_intermediate_size)
            assert trainer.config.balance is not None
            balance = trainer.config.balance.model_copy(update={"planner": mode, "transport": "collective"})
            balancer = Balancer(trainer.meshes.ep, model.num_experts, shapes, trainer.dtype, balance)
            self._balancing[mode] = [ExpertBalancing(balancer, b.layer, b.weights) for b in self._balancing[ON]]
        return self._balancing[mode]

    def set(self, mode: str) -> "tuple[CountingDispatcher, Balancer | None]":
        """Switches; returns the mode's dispatcher, emptied, and its balancer."""
        is_off = mode in (OFF, FORCED)
        dispatcher = self._dispatchers[OFF if is_off else ON]
        dispatcher.arrived.clear()
        balancing = None if is_off else self._balancing_of(mode)
        for index, layer in enumerate(self.layers):
            layer.dispatcher, layer.balancing = dispatcher, None if balancing is None else balancing[index]
        balancer = None if balancing is None else balancing[0].balancer
        self.trainer.step_runner.balancer = balancer
        if balancer is not None:
            balancer.take_records()
        return dispatcher, balancer

    def lay_down(self, routing: SyntheticRouting | None) -> None:
        for layer in self.layers:
            layer.gate.synthetic = routing


class Runner:
    """Runs single steps: of training, or of one decoder layer."""

    def __init__(self, trainer: Trainer, study: Study) -> None:
        self.trainer = trainer
        self.batches = [trainer.loader.next_step() for _ in range(study.steps)]
        sequences = trainer.config.train.global_batch_size
        self.tokens = sequences * trainer.config.train.sequence_length
        self.run: Callable[[int], dict[str, float]] = self._layer_step if study.layer else self._training_step
        if study.layer:
            self.tokens //= trainer.plan.accumulation_steps
            self._layer, self._inputs = self._one_layer()
            self._training_step(0)  # FSDP's units get to know the model that they are of

    def _training_step(self, index: int) -> dict[str, float]:
        runner, batches = self.trainer.step_runner, self.batches[index % len(self.batches)]
        self.trainer.timer.start_step()
        sums, counts = runner.forward_backward(batches, self.tokens)
        result, norm = runner.reduce(sums, counts, self.tokens, stop=False)
        runner.update(result, norm, lr=0.0)
        if result.balance is None:
            return {}
        return {
            "imbalance_routed": float(result.rank_imbalance_L.mean()),
            "imbalance_planned": float(result.balance.after_L.mean()),
            "copies_per_step": result.balance.copies,
            "copied_bytes_per_step": result.balance.num_bytes,
            "plan_s_per_step": result.balance.plan_s,
            "sync_s_per_step": result.balance.sync_s,
        }

    def _one_layer(self) -> tuple[DecoderLayer, tuple[Any, ...]]:
        """The first MoE layer, random activations, and what else it takes."""
        trainer = self.trainer
        layer = next(m for m in trainer.model.modules() if isinstance(m, DecoderLayer) and m.is_moe)
        model, length = trainer.config.model, trainer.config.train.sequence_length
        device, dtype = trainer.world.device, trainer.dtype
        shape = (trainer.plan.micro_batch_size, length, model.hidden_size)
        x_BSD = torch.randn(shape, device=device, dtype=dtype).requires_grad_()
        positions = torch.arange(length, device=device)[None]
        rotary = rotary_tables(positions, model.head_dim, model.rope_theta, dtype, model.rope_scaling)
        return layer, (x_BSD, rotary, None, None)

    def _layer_step(self, index: int) -> dict[str, float]:
        y_BSD, _ = self._layer(*self._inputs)
        y_BSD.backward(torch.ones_like(y_BSD))
        self.trainer.optimizer.zero_grad()
        if self.trainer.step_runner.balancer is None:
            return {}
        (record,) = self.trainer.step_runner.balancer.take_records()
        return {
            "imbalance_routed": record.before,
            "imbalance_planned": record.after,
            "copies_per_step": record.copies,
            "copied_bytes_per_step": record.num_bytes,
            "plan_s_per_step": record.seconds,
            "sync_s_per_step": self.trainer.step_runner.balancer.take_waited_s(),
        }


def run_study(study: Study, config: TrainConfig) -> None:
    """Measures and, on rank 0, prints the table and writes the results file. Collective."""
    configure_logging()
    with StopSignals() as stop, join_world(get_accelerator(), config.parallel.timeout_s) as world:
        config = _with_advice(study, config, world)
        datasets = build_datasets(config, world)
        trainer = Trainer(config, world, datasets, study.run_dir or study.out.parent, stop)
        if study.run_dir is not None:
            trainer.restore(resume=True)
        try:
            rows = _measure(study, trainer)
        finally:
            trainer.loader.close()
        if world.rank == 0:
            _show(study, trainer, rows)


def _with_advice(study: Study, config: TrainConfig, world: World) -> TrainConfig:
    """The configuration with as many slots as the cost model advises for the study's workloads, if that is asked."""
    assert config.balance is not None
    if study.slots != "advise":
        return config
    plan = plan_run(config, world.size)
    copy_tokens = measure_copy_tokens(config, plan, world)
    workloads = [study.workload(name, config, plan.axes.ep) for name in study.all_workloads if name != NATURAL]
    if not workloads:
        raise ConfigError("--slots advise needs a workload whose load is known: add one besides natural")
    tokens = plan.micro_batch_size * config.train.sequence_length
    slots = max(slots_for(workload, tokens, config.balance, copy_tokens) for workload in workloads)
    changes = {"num_redundant_experts_per_rank": max(1, slots), "copy_tokens": copy_tokens}
    return config.model_copy(update={"balance": config.balance.model_copy(update=changes)})


def _measure(study: Study, trainer: Trainer) -> list[dict[str, Any]]:
    """One row for each workload and mode, equal on every rank."""
    switch, runner = Switch(trainer), Runner(trainer, study)
    world, rank, ep_size = trainer.world, trainer.meshes.ep.get_local_rank(), trainer.plan.axes.ep
    even = study.workload("balanced", trainer.config, ep_size)
    turns = [(name, mode) for name in study.all_workloads for _ in range(study.rounds) for mode in study.modes]
    parts: dict[tuple[str, str], list[dict[str, Any]]] = {}
    columns = (TextColumn("{task.description:28}"), *Progress.get_default_columns()[1:3], TimeRemainingColumn())
    with Progress(*columns, disable=world.rank > 0, transient=True) as progress:
        task = progress.add_task("", total=len(turns))
        for name, mode in turns:
            progress.update(task, description=f"{name}, {mode}")
            workload = None if name == NATURAL else study.workload(name, trainer.config, ep_size)
            routings = [_routing(workload, mode, step, rank, even) for step in range(study.steps)]
            with world.operation(f"{name}, {mode}", deadline_s=10 * world.timeout_s):
                parts.setdefault((name, mode), []).append(_turn(switch, runner, mode, routings))
            progress.advance(task)
    return [{"workload": name, "mode": mode} | _merge(found, runner.tokens) for (name, mode), found in parts.items()]


def _routing(workload: Workload | None, mode: str, step: int, rank: int, even: Workload) -> SyntheticRouting | None:
    """What a step lays down; None is the router's choice. Forced: `even`, with the workload's tokens."""
    if mode == FORCED:
        return replace((workload or even).routing(step, rank), shares_E=even.shares())
    return None if workload is None else workload.routing(step, rank)


def _turn(switch: Switch, runner: Runner, mode: str, routings: Sequence[SyntheticRouting | None]) -> dict[str, Any]:
    """A few steps of one mode: seconds of the slowest rank, loads, copies, memory. Collective."""
    trainer, world = switch.trainer, switch.trainer.world
    dispatcher, balancer = switch.set(mode)
    accelerator = world.accelerator
    accelerator.reset_peak_memory()
    seconds: list[float] = []
    balanced: list[dict[str, float]] = []
    sent_P = torch.zeros(trainer.plan.axes.ep, dtype=torch.int64, device=world.device)
    dispatcher.sent_P = sent_P
    for index in range(-WARM_UP, len(routings)):
        switch.lay_down(routings[index])
        if index == 0:
            dispatcher.arrived.clear()
            dispatcher.sent_P = None
        dist.barrier(group=trainer.meshes.world_group)
        accelerator.synchronize()
        start = accelerator.event(timing=True)
        start.record()
        found = runner.run(index)
        end = accelerator.event(timing=True)
        end.record()
        end.synchronize()
        if index >= 0:
            seconds.append(start.elapsed_ms(end) / 1000)
            balanced += [found] if found else []
    switch.lay_down(None)
    mine = {
        "seconds": seconds,
        "memory": accelerator.memory().peak_allocated,
        "buffers": 0 if balancer is None else balancer.num_bytes,
        "rows": torch.stack(dispatcher.arrived).tolist(),
        "sent": sent_P.tolist(),
    }
    ranks = gather_json(mine, world)
    group = dist.get_process_group_ranks(trainer.meshes.ep_group)
    rows_CP = torch.tensor([ranks[r]["rows"] for r in group], dtype=torch.float64).T
    return {
        "seconds": [max(step) for step in zip(*(r["seconds"] for r in ranks))],
        "memory": max(r["memory"] for r in ranks),
        "buffers": mine["buffers"],
        "delivered": (rows_CP.amax(1) / rows_CP.mean(1).clamp(min=1)).tolist(),
        "balanced": balanced,
        "sent": [ranks[r]["sent"] for r in group],
    }


def _merge(parts: Sequence[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """One row of all turns of a mode. Imbalances are means over layers, microbatches and steps."""
    seconds = [s for part in parts for s in part["seconds"]]
    balanced = [found for part in parts for found in part["balanced"]]
    delivered = [value for part in parts for value in part["delivered"]]
    row: dict[str, Any] = {
        "step_s": statistics.median(seconds),
        "step_s_min": min(seconds),
        "step_s_max": max(seconds),
        "steps": len(seconds),
        "tokens_per_second": tokens / statistics.median(seconds),
        "imbalance_delivered": statistics.fmean(delivered) if delivered else 1.0,
        "memory_peak_bytes": max(part["memory"] for part in parts),
        "buffer_bytes": parts[-1]["buffers"],
    }
    sent_PP = parts[-1]["sent"]
    row["sent_rows"] = sent_PP
    row["remote_share"] = 1 - sum(sent[i] for i, sent in enumerate(sent_PP)) / max(1, sum(map(sum, sent_PP)))
    row["imbalance_routed"] = row["imbalance_delivered"]
    for key in balanced[0] if balanced else ():
        row[key] = statistics.fmean(found[key] for found in balanced)
    return row


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Ratios of tokens/s: on over off and on over forced for the hot rank (or the first uneven workload there is),
    and what on costs with a balanced load."""
    rate = {(row["workload"], row["mode"]): row["tokens_per_second"] for row in rows}
    names = list(dict.fromkeys(row["workload"] for row in rows))
    uneven = [name for name in names if name not in (NATURAL, "balanced")]
    chosen = "hot_rank" if "hot_rank" in names else (uneven or names)[0]
    summary = {}
    for other, key in ((OFF, "on_over_off"), (FORCED, "on_over_forced")):
        if (chosen, ON) in rate and (chosen, other) in rate:
            summary[key] = rate[chosen, ON] / rate[chosen, other]
    if ("balanced", ON) in rate and ("balanced", OFF) in rate:
        summary["balanced_cost"] = rate["balanced", OFF] / rate["balanced", ON] - 1
    return summary


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For each workload, whether balancing paid; differences within `NOISE` are none."""
    seconds = {(row["workload"], row["mode"]): row["step_s"] for row in rows}
    lines = []
    for name in dict.fromkeys(row["workload"] for row in rows):
        off, on = seconds.get((name, OFF)), seconds.get((name, ON))
        if off is None or on is None:
            continue
        if abs(on / off - 1) <= NOISE:
            text = "on and off take the same time"
        elif on < off:
            text = f"balancing pays: {off / on:.2f} x the tokens/s of off"
        else:
            text = f"balancing does not pay here: {on / off - 1:.0%} more time than off (docs/balancing.md says when)"
        lines.append(f"{name}: {text}")
    return lines


def over_ceiling(rows: Sequence[dict[str, Any]]) -> str | None:
    """Why some share of the ceiling is over 100 % in the table, from the spread of the steps' times; None: none is."""
    forced = {row["workload"]: row for row in rows if row["mode"] == FORCED}
    over = [row for row in rows if round(row["of_ceiling"] or 0, 3) > 1]
    if not over:
        return None
    ceilings = [forced[row["workload"]] for row in over]
    spread = max(row["step_s_max"] / row["step_s_min"] - 1 for row in (*over, *ceilings))
    text = (
        "A share over 100 %: the ceiling is measured too, in turns with the others, and steps of one mode differ here "
        f"by up to {spread:.0%}; more --rounds and --steps make medians steadier."
    )
    for row, ceiling in zip(over, ceilings):
        if row["step_s_max"] < ceiling["step_s_min"]:
            is_nearer = row["remote_share"] < ceiling["remote_share"] - 0.005
            why = "fewer of its rows leave their rank" if is_nearer else "the machine's speed changed between the turns"
            text += f" {row['workload']} {row['mode']} is beyond that: {why}."
    return text


def _show(study: Study, trainer: Trainer, rows: list[dict[str, Any]]) -> None:
    balance = trainer.config.balance
    assert balance is not None
    ceiling = {row["workload"]: row["step_s"] for row in rows if row["mode"] == FORCED}
    title = "one decoder layer, forward and backward" if study.layer else "training steps"
    table = Table(title=f"Balancing: {title}, {balance.num_redundant_experts_per_rank} replica slots per rank")
    headings = [
        "workload",
        "mode",
        "ms",
        "tokens/s",
        "of ceiling",
        "routed",
        "planned",
        "delivered",
        "remote",
        "copies",
        "MiB",
        "peak MiB",
    ]
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < 2 else "right")
    previous = None
    for row in rows:
        name = row["workload"]
        if previous not in (None, name):
            table.add_section()
        best = ceiling.get(name)
        row["of_ceiling"] = None if best is None else best / row["step_s"]
        table.add_row(
            "" if name == previous else name,
            row["mode"],
            f"{row['step_s'] * 1e3:.1f}",
            f"{row['tokens_per_second']:,.0f}",
            "" if best is None else f"{row['of_ceiling']:.1%}",
            _number(row.get("imbalance_routed")),
            _number(row.get("imbalance_planned")),
            _number(row["imbalance_delivered"]),
            f"{row['remote_share']:.0%}",
            _number(row.get("copies_per_step"), ".0f"),
            _number(row.get("copied_bytes_per_step", 0) / 2**20 if "copied_bytes_per_step" in row else None, ".1f"),
            f"{row['memory_peak_bytes'] / 2**20:,.0f}",
        )
        previous = name
    console = Console(highlight=False)
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table)
    console.print(
        "routed, planned, delivered: largest over mean rank load, by the router's choice, as planned, and as rows "
        "arrived; remote: rows that leave their rank; copies and MiB: replicas per step and their weights, one way."
    )
    note = over_ceiling(rows)
    if note is not None:
        console.print(note)
    if balance.copy_tokens:
        tokens = trainer.plan.micro_batch_size * trainer.config.train.sequence_length
        load = tokens * trainer.config.model.num_experts_per_tok
        pays = break_even_imbalance(load, balance.copy_tokens)
        console.print(
            f"One copy takes as long as an expert's {balance.copy_tokens} tokens; with a mean rank load of {load} one "
            f"replica pays from an imbalance of {pays:.3f} on."
        )
    for line in verdicts(rows):
        console.print(line, soft_wrap=True)
    summary: dict[str, Any] = dict(summarize(rows))
    summary |= {
        "imbalance": study.imbalance,
        "balance": balance.model_dump(mode="json"),
        "model": trainer.config.model.model_dump(mode="json"),
        "tokens_per_step": trainer.config.train.global_batch_size * trainer.config.train.sequence_length,
        "ep_size": trainer.plan.axes.ep,
        "world_size": trainer.world.size,
        "layer": study.layer,
    }
    hardware = {"device": trainer.world.accelerator.device_name(), "devices": trainer.world.size}
    path = write_results(study.out, rows, summary, ["torch", "equipoise"], hardware)
    console.print(f"written to {path}", soft_wrap=True)


def _number(value: float | None, form: str = ".3f") -> str:
    return "" if value is None else format(value, form)
