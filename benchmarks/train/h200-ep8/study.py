"""Some modes of one routing of the study in README.md, in this process: the first step of each, which has to give what
the others' gave, then steps in turns, then a profile of on. Or their loss curves.

Results go into one file, whose other modes stay: modes that do not fit into the memory together are run one process
after the other (run.sh). The file is written after every round, so that a run that is cut short leaves what it has.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from balance_gpu import Bench, Mode, benchmark_config, symmetric_bytes
from exposed_gpu import profiled
from loss_curves import curve_summary, figure

from equipoise.accelerator import get_accelerator
from equipoise.balance.bounds import rank_load
from equipoise.balance.config import planner_settings
from equipoise.balance.planner import plan_loads
from equipoise.balance.protocol import PlannerSettings
from equipoise.bench.hot_experts import HotExperts
from equipoise.bench.results import write_results
from equipoise.distributed.world import World, join_world
from equipoise.errors import ConfigError, RankFailure
from equipoise.moe.synthetic import Workload
from equipoise.train.config import plan_run
from equipoise.train.optimizer import learning_rate
from equipoise.train.stop import StopSignals

NATURAL, CURVES = "natural", "curves"
MODES = {
    "all_to_all": "off, all_to_all",
    "off": "off",
    "on-1": "on, 1 slot",
    "on-2": "on, 2 slots",
    "forced": "forced",
}
"""Names in files by those on the command line, in the order in which they are measured."""
SLOTS = {"on-1": 1, "on-2": 2}
SPARE_LAID, SPARE_NATURAL = 0.02, 0.05
"""Room in the buffers over what plans leave on the busiest rank. Natural loads may move a little from run to run."""
CURVE_FACTOR = 1.5
"""Capacity for a router that learns, whose loads nobody knows beforehand."""
SAVE_EVERY = 20
PARITY = 2e-2
"""Largest relative difference of loss and gradient norm between modes of one routing, in BF16."""
TIMEOUT_S = 300.0


class Results:
    """The study's file. Ranks read it together before any of them writes."""

    def __init__(self, path: Path, world: World, group: dist.ProcessGroup) -> None:
        self.path, self.is_writer = path, world.rank == 0
        content = json.loads(path.read_text()) if path.exists() else {}
        self.rows: list[dict[str, Any]] = content.get("rows", [])
        self.summary: dict[str, Any] = content.get("summary", {})
        name = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
        self._hardware = {"device": name, "devices": world.size}
        dist.barrier(group=group)

    def put(self, rows: Sequence[dict[str, Any]]) -> None:
        """In place of earlier rows of the same modes; in the order of `MODES`."""
        new = {row["mode"] for row in rows}
        order = list(MODES.values())
        kept = [row for row in self.rows if row["mode"] not in new]
        self.rows = sorted([*kept, *rows], key=lambda row: order.index(row["mode"]))

    def save(self) -> None:
        if self.is_writer:
            write_results(self.path, self.rows, self.summary, ("torch", "triton"), self._hardware)


def laid_loads(workload: Workload | HotExperts, tokens: int, num_ranks: int) -> torch.Tensor:
    """int64 [1, E]: what a routing that is laid down gives the experts of a group, with so many tokens on each rank."""
    counts = [workload.routing(0, rank).expert_counts(tokens) for rank in range(num_ranks)]
    return torch.tensor(counts).sum(0)[None]


def capacity_factor(
    loads_BE: torch.Tensor, num_ranks: int, rows: int, settings: PlannerSettings | None, spare: float
) -> float:
    """Rows that the busiest rank receives under any of these loads, over the `rows` that each rank sends, and some
    more. `settings`: after the plan for them, which with few slots cannot always even the ranks out; None: as routed.
    """
    if settings is None:
        loads_BP = rank_load(loads_BE, num_ranks)
    else:
        loads_BP = plan_loads(loads_BE, num_ranks, settings).rank_load
    return int(loads_BP.max()) / rows * (1 + spare)


class Study:
    """The model, and the modes that are asked for."""

    def __init__(self, world: World, stop: StopSignals, options: argparse.Namespace) -> None:
        self.started, self.world, self.options = time.monotonic(), world, options
        is_real = options.routing in (NATURAL, CURVES)
        config = benchmark_config(options.recipe, options.layers, real_text=is_real)
        plan, model = plan_run(config, world.size), config.model
        sizes = model.num_experts, model.num_experts_per_tok, plan.axes.ep
        self.ep, self.tokens = plan.axes.ep, plan.micro_batch_size * config.train.sequence_length
        self.sent_rows = self.tokens * model.num_experts_per_tok
        self.even = Workload("balanced", 1.0, *sizes)
        self.workload: HotExperts | None = None if is_real else HotExperts(float(options.routing), *sizes)
        torch.manual_seed(0)
        self.bench = Bench(config, world, stop, Path(tempfile.mkdtemp()))
        self.results = Results(options.out, world, self.bench.trainer.meshes.world_group)
        self.results.summary["routing"] = options.routing
        self.modes: dict[str, Mode] = {}

    def capacities(self, loads_BE: torch.Tensor, spare: float) -> dict[str, float]:
        """Of every mode with buffers."""
        balance = self.bench.config.balance
        assert balance is not None
        even_BE = laid_loads(self.even, self.tokens, self.ep)
        found = {
            "off": capacity_factor(loads_BE, self.ep, self.sent_rows, None, spare),
            "forced": capacity_factor(even_BE, self.ep, self.sent_rows, None, spare),
        }
        for key, slots in SLOTS.items():
            settings = planner_settings(balance.model_copy(update={"num_redundant_experts_per_rank": slots}))
            found[key] = capacity_factor(loads_BE, self.ep, self.sent_rows, settings, spare)
        return found

    def make_modes(self) -> None:
        """Collective. Buffers are allocated when a mode is first used."""
        if self.options.routing == CURVES:
            factors = dict.fromkeys(MODES, CURVE_FACTOR)
        elif self.workload is not None:
            factors = self.capacities(laid_loads(self.workload, self.tokens, self.ep), SPARE_LAID)
        elif self.options.modes[0] == "all_to_all":
            factors = self.capacities(self.natural_loads(), SPARE_NATURAL)
        else:
            factors = self.results.summary.get("capacity_factor", {})
        if not factors:
            raise ConfigError(
                "natural loads are not known yet: run the mode all_to_all first, whose buffers hold any load"
            )
        self.results.summary["capacity_factor"] = factors
        for key in self.options.modes:
            self.modes.setdefault(key, self.make_mode(key, factors))

    def make_mode(self, key: str, factors: dict[str, float]) -> Mode:
        experts, name = self.bench.config.model.num_experts, MODES[key]
        if key == "all_to_all":
            return Mode(name, self.bench.dispatcher("all_to_all", experts, 0), None)
        balancer = self.bench.balancer(SLOTS[key]) if key in SLOTS else None
        experts = experts if balancer is None else balancer.num_physical_experts
        dispatcher = self.bench.dispatcher("symmetric", experts, factors[key])
        return Mode(name, dispatcher, balancer, is_forced=key == "forced")

    def natural_loads(self) -> torch.Tensor:
        """int64 [B, E]: of every batch, microbatch and layer, as the router chooses. Without buffers that could be too
        small."""
        self.modes["all_to_all"] = self.make_mode("all_to_all", {})
        loads = [self.step(self.modes["all_to_all"], number)[1] for number in range(len(self.bench.batches))]
        return torch.cat(loads)

    def step(self, mode: Mode, number: int, lr: float = 0.0, batches: Any = None) -> tuple[Any, torch.Tensor]:
        """One step: its result, and int64 [B, E] of its loads. With rate 0 it changes no weight."""
        runner = self.bench.trainer.step_runner
        self.bench.switch(mode)
        runner.lay_down_routing(self.even if mode.is_forced else self.workload)  # type: ignore[arg-type]
        self.bench.trainer.timer.start_step()
        batches = self.bench.batches[number] if batches is None else batches
        sums, counts_NLE = runner.forward_backward(batches, self.bench.tokens)
        loads_NLE = counts_NLE.clone()
        dist.all_reduce(loads_NLE, group=self.bench.trainer.meshes.ep_group)
        result = runner.finish(sums, counts_NLE, self.bench.tokens, lr)
        return result, loads_NLE.flatten(0, 1).cpu()

    def check_parity(self) -> None:
        """The first step of each mode, compared with all others that are known.

        Raises:
            RankFailure: loss or gradient norm differ by more than `PARITY`. On all ranks.
        """
        known = self.results.summary.setdefault("first_step", {})
        for mode in self.modes.values():
            if not mode.is_forced:
                result, _ = self.step(mode, 0)
                known[mode.name] = {"loss": result.loss, "grad_norm": result.grad_norm}
        reference, *others = [name for name in MODES.values() if name in known] or [""]
        apart = {name: max(abs(known[name][key] / known[reference][key] - 1) for key in known[name]) for name in others}
        self.results.summary["parity"] = apart | ({"with": reference} if apart else {})
        self.results.save()
        if any(not difference <= PARITY for difference in apart.values()):
            raise RankFailure(f"modes differ from {reference!r} by {apart}, more than {PARITY}: nothing is measured")

    def used_s(self) -> float:
        """Seconds since the start. Ranks go on or not together: the slowest one's clock counts."""
        used = torch.tensor([time.monotonic() - self.started], device=self.world.device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self.bench.trainer.meshes.world_group)
        return float(used)

    def measure(self) -> None:
        """Turns of every mode, then a profile if on with one slot is among them."""
        options = self.options
        turns: dict[str, list[dict[str, Any]]] = {key: [] for key in self.modes}
        rounds = 1 if len(self.modes) == 1 else options.rounds
        for number in range(rounds):
            if number and self.used_s() > 0.75 * options.limit_s:
                break
            for key, mode in self.modes.items():
                turns[key].append(self.bench.turn(mode, self.workload, self.even, -(-options.steps // rounds)))
            self.results.put([self.row_of(key, turns[key]) for key in self.modes])
            self.results.summary["of_forced"] = of_forced(self.results.rows)
            self.results.save()
        if self.world.device.type == "cuda" and "on-1" in self.modes:
            found = profiled(self.bench, self.modes["on-1"], self.workload, self.even)
            self.results.summary["profile"] = found["transfers"]
            self.results.save()

    def row_of(self, key: str, turns: list[dict[str, Any]]) -> dict[str, Any]:
        ms = [value for turn in turns for value in turn["ms"]]
        mode, factors = self.modes[key], self.results.summary["capacity_factor"]
        return {
            "mode": mode.name,
            "step_s": statistics.median(ms) / 1000,
            "steps": len(ms),
            "tokens_per_second": self.bench.tokens / statistics.median(ms) * 1000,
            "memory_peak_gb": (max(turn["peak"] for turn in turns) + symmetric_bytes(mode)) / 1e9,
            "symmetric_gb": symmetric_bytes(mode) / 1e9,
            "capacity_factor": None if key == "all_to_all" else factors[key],
            "imbalance_before": turns[-1]["imbalance"],
            "imbalance_after": turns[-1]["planned"],
            "copies_per_step": turns[-1]["copies"],
        }

    def train(self) -> None:
        """Loss curves: steps that change the weights, of one mode."""
        (mode,) = self.modes.values()
        optimizer, loader, steps = self.bench.config.optimizer, self.bench.trainer.loader, self.options.steps
        rows: list[dict[str, Any]] = []
        for step in range(1, steps + 1):
            batches = self.bench.batches[step - 1] if step <= len(self.bench.batches) else loader.next_step()
            result, _ = self.step(mode, 0, learning_rate(optimizer, step, steps), batches)
            row = {"mode": mode.name, "step": step, "loss": result.loss}
            rows.append(row | {"rank_imbalance": float(result.rank_imbalance_L.mean())})
            if result.balance is not None:
                after_L, copies = result.balance.after_L, result.balance.copies
                rows[-1] |= {"rank_imbalance_after": float(after_L.mean()), "balance_copies": copies}
            is_last = step == steps
            if step % SAVE_EVERY == 0 or is_last:
                is_last = is_last or self.used_s() > 0.9 * self.options.limit_s
                self.results.put(rows)
                self._save_curves()
            if is_last:
                break

    def _save_curves(self) -> None:
        losses: dict[str, list[float]] = {}
        for row in self.results.rows:
            losses.setdefault(row["mode"], []).append(row["loss"])
        off, on = losses.get(MODES["all_to_all"]), losses.get(MODES["on-1"])
        if off and on:
            self.results.summary |= curve_summary(off, on)
            if self.results.is_writer:
                steps = min(len(off), len(on))
                title = f"{self.options.recipe}: training loss, balancing off and on, {steps} steps"
                both = {"off": off[:steps], "on": on[:steps]}
                self.results.path.with_suffix(".svg").write_text(figure(both, title))
        self.results.save()


def of_forced(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Share of force-balanced tokens/s by mode; nothing before that is known."""
    rates = {row["mode"]: row["tokens_per_second"] for row in rows}
    return {mode: rate / rates["forced"] for mode, rate in rates.items()} if "forced" in rates else {}


def study(world: World, stop: StopSignals, options: argparse.Namespace) -> None:
    run = Study(world, stop, options)
    try:
        run.make_modes()
        if options.routing == CURVES:
            run.train()
        else:
            run.check_parity()
            run.measure()
    finally:
        run.bench.close()
    if world.rank == 0:
        asked = [MODES[key] for key in run.modes]
        for row in run.results.rows:
            if row["mode"] in asked and options.routing != CURVES:
                print(row, flush=True)
        print(run.results.summary, flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("routing", help=f"{NATURAL}, the hot rank's load over the mean, or {CURVES}")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--recipe", default="h200-ep8")
    parser.add_argument("--layers", type=int, default=0, help="0: the recipe's")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each mode, if there are several")
    parser.add_argument("--limit-s", type=float, default=570.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.routing not in (NATURAL, CURVES):
        try:
            float(options.routing)
        except ValueError:
            parser.error(f"routing is {options.routing!r}; expected {NATURAL}, {CURVES} or a number such as 1.5")
    options.modes = [key for key in MODES if key in options.modes]
    if options.routing == CURVES and len(options.modes) != 1:
        parser.error(f"{CURVES}: one mode to a process, since each begins with new weights: give --modes")
    return options


def main() -> None:
    options = parse()
    with join_world(get_accelerator(), TIMEOUT_S) as world:
        study(world, StopSignals(), options)  # not entered: a signal ends this process, and not only its step


if __name__ == "__main__":
    main()
