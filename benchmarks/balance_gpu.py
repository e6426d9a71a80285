"""Training steps on two GPUs or more with expert parallelism: balancing off, on, and routing forced even.

All modes share one model, one machine and one run, and take turns; a step's time is that of the slowest rank, from the
end of the step before to its own, and a mode's figure the median. Forced is the ceiling: the same dispatcher, no
balancing runtime, every expert equally loaded. Off is measured twice, with the symmetric dispatcher and with
`all_to_all`; the difference between off and a model that was built without balancing is given with its confidence
interval, from pairs of turns.

Run: torchrun --nproc-per-node 2 benchmarks/balance_gpu.py [--layers N] [--steps N]   (writes
benchmarks/results/balance-h200-ep2.json)
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from equipoise.accelerator import get_accelerator
from equipoise.balance import Balancer
from equipoise.bench.advice import measure_copy_tokens, slots_for
from equipoise.bench.hot_experts import HotExperts
from equipoise.bench.results import device_word, parse_options, results_file, write_results
from equipoise.data import DataConfig, build_dataset
from equipoise.dispatch import Dispatcher, build_dispatcher
from equipoise.distributed.agree import gather_json
from equipoise.distributed.world import World, join_world
from equipoise.moe.balancing import ExpertBalancing, expert_shapes
from equipoise.moe.synthetic import Workload
from equipoise.train import trainer as trainer_module
from equipoise.train.config import TrainConfig, plan_run
from equipoise.train.load import load_config
from equipoise.train.step import moe_layers
from equipoise.train.stop import StopSignals
from equipoise.train.trainer import Trainer

trainer_module.build_meshes = cache(trainer_module.build_meshes)  # several trainers live on the groups of one

WARM_UP = 5
PAIR_STEPS = 5
"""Steps of a turn where off is compared with a model without balancing, after one that is not counted."""
NATURAL = "natural"
CASES = (("hot_rank", 1.9, 0), (NATURAL, 1.0, 2), ("hot_experts", 1.6, 2), ("hot_experts", 1.3, 2))
"""Workload, its imbalance, replica slots per rank (0: as many as the cost model advises)."""


@dataclass(frozen=True)
class Mode:
    """What the model's MoE layers use. `slots` 0: no balancing."""

    name: str
    dispatcher: Dispatcher
    balancer: Balancer | None
    is_forced: bool = False


class Bench:
    """One trainer, and what its layers are switched between."""

    def __init__(self, config: TrainConfig, world: World, stop: StopSignals, folder: Path) -> None:
        loop = config.train
        datasets = build_dataset(config.data, loop.sequence_length, vocab_size=config.model.vocab_size, seed=0)
        self.trainer = Trainer(config, world, datasets, folder, stop)
        self.world, self.config = world, config
        self.layers = moe_layers(self.trainer.model)
        self.built = [layer.balancing for layer in self.layers]
        self.batches = [self.trainer.loader.next_step() for _ in range(4)]
        self.tokens = loop.global_batch_size * loop.sequence_length
        self.rank = self.trainer.meshes.ep.get_local_rank()
        self.plain: Dispatcher | None = None
        self.balanced: dict[int, Mode] = {}

    def close(self) -> None:
        self.trainer.loader.close()

    def dispatcher(self, name: str, num_experts: int, factor: float) -> Dispatcher:
        space = self.trainer.model.symmetric_space
        if space is None:  # where there is none, everything else can be compared
            name = "all_to_all"
        options: dict[str, Any] = {}
        if name == "symmetric":
            options = {"capacity_factor": factor, "num_buffers": len(self.layers) + 1}
            options["weighs_rows"] = self.config.dispatch.weighs(True)
        return build_dispatcher(name, num_experts, self.trainer.meshes.ep, space, **options)  # type: ignore[arg-type]

    def balancer(self, slots: int) -> Balancer:
        model, balance = self.config.model, self.config.balance
        assert balance is not None
        chosen = balance.model_copy(update={"num_redundant_experts_per_rank": slots})
        shapes = expert_shapes(model.hidden_size, model.moe_intermediate_size)
        space = self.trainer.model.symmetric_space
        return Balancer(self.trainer.meshes.ep, model.num_experts, shapes, self.trainer.dtype, chosen, space=space)

    def switch(self, mode: Mode) -> None:
        for index, layer in enumerate(self.layers):
            layer.dispatcher = mode.dispatcher
            balancer = mode.balancer
            layer.balancing = None if balancer is None else ExpertBalancing(balancer, index, layer.experts)
        self.trainer.step_runner.balancer = mode.balancer

    def modes(self, slots: int, factor: float = 1.05) -> list[Mode]:
        """Off, on and forced, of the symmetric dispatcher."""
        if self.plain is None:
            self.plain = self.dispatcher("symmetric", self.config.model.num_experts, 0)
        if slots not in self.balanced:
            balancer = self.balancer(slots)
            dispatcher = self.dispatcher("symmetric", balancer.num_physical_experts, factor)
            self.balanced[slots] = Mode("on", dispatcher, balancer)
        return [Mode("off", self.plain, None), self.balanced[slots], Mode("forced", self.plain, None, is_forced=True)]

    def turn(
        self,
        mode: Mode,
        workload: Workload | HotExperts | None,
        even: Workload,
        steps: int,
        warm_up: int = WARM_UP,
    ) -> dict[str, Any]:
        """A few steps: milliseconds of the slowest rank, peak memory, loads. Collective. As in training the host waits
        for the device before each update only, and a step lasts from the end of the one before to its own."""
        self.switch(mode)
        accelerator, runner = self.world.accelerator, self.trainer.step_runner
        accelerator.reset_peak_memory()
        laid = even if mode.is_forced else workload
        for layer in self.layers:
            layer.gate.synthetic = None if laid is None else laid.routing(0, self.rank)
        dist.barrier(group=self.trainer.meshes.world_group)
        accelerator.synchronize()
        ends = []
        for step in range(-max(warm_up, 1), steps):
            self.trainer.timer.start_step()
            sums, counts = runner.forward_backward(self.batches[step % len(self.batches)], self.tokens)
            result, norm = runner.reduce(sums, counts, self.tokens, stop=False)
            runner.update(result, norm, lr=0.0)
            if step >= -1:
                ends.append(accelerator.event(timing=True))
                ends[-1].record()
        accelerator.synchronize()
        milliseconds = [start.elapsed_ms(end) for start, end in pairwise(ends)]
        balance = result.balance
        memory = accelerator.memory()
        mine = {"ms": milliseconds, "peak": memory.peak_allocated}
        ranks = gather_json(mine, self.world)
        return {
            "ms": [max(step) for step in zip(*(r["ms"] for r in ranks))],
            "peak": max(r["peak"] for r in ranks),
            "imbalance": float(result.rank_imbalance_L.mean()),
            "planned": None if balance is None else float(balance.after_L.mean()),
            "copies": 0.0 if balance is None else balance.copies,
        }


def measure(
    bench: Bench,
    steps: int,
    rounds: int,
    slots_of_hot_rank: int,
    chosen: tuple[str, ...],
    save: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """One row for each workload (of those chosen) and mode. Saves after each workload: a run may be cut short."""
    model, ep = bench.config.model, bench.trainer.plan.axes.ep
    make = lambda name, imbalance: Workload(name, imbalance, model.num_experts, model.num_experts_per_tok, ep)  # noqa: E731
    even = make("balanced", 1.0)
    collective = bench.dispatcher("all_to_all", model.num_experts, 0)
    rows = []
    for name, imbalance, given in (case for case in CASES if not chosen or f"{case[0]}:{case[1]}" in chosen):
        slots = given or slots_of_hot_rank
        workload: Workload | HotExperts | None = None
        if name == "hot_experts":
            workload = HotExperts(imbalance, model.num_experts, model.num_experts_per_tok, ep)
        elif name != NATURAL:
            workload = make(name, imbalance)
        modes = [*bench.modes(slots), Mode("off, all_to_all", collective, None)]
        found: dict[str, list[dict[str, Any]]] = {mode.name: [] for mode in modes}
        for _ in range(rounds):
            for mode in modes:
                found[mode.name].append(bench.turn(mode, workload, even, -(-steps // rounds)))
        for mode in modes:
            turns = found[mode.name]
            ms = [value for turn in turns for value in turn["ms"]]
            row = {
                "workload": name,
                "imbalance": imbalance,
                "slots": slots if mode.name == "on" else 0,
                "mode": mode.name,
                "step_ms": statistics.median(ms),
                "step_ms_min": min(ms),
                "step_ms_max": max(ms),
                "steps": len(ms),
                "tokens_per_second": bench.tokens / statistics.median(ms) * 1000,
                "memory_peak_bytes": max(turn["peak"] for turn in turns) + symmetric_bytes(mode),
                "imbalance_routed": turns[-1]["imbalance"],
                "imbalance_planned": turns[-1]["planned"],
                "copies_per_step": turns[-1]["copies"],
            }
            rows.append(row)
            if bench.world.rank == 0:
                print({key: row[key] for key in ("workload", "imbalance", "slots", "mode", "step_ms")}, flush=True)
                print({key: row[key] for key in list(row)[8:]}, flush=True)
        save(rows)
    return rows


def symmetric_bytes(mode: Mode) -> int:
    """Buffers outside of the allocator that counts the peak."""
    dispatcher = getattr(mode.dispatcher, "num_bytes", 0)
    return dispatcher + (0 if mode.balancer is None else mode.balancer.num_bytes)


def compare_off_with_absent(config: TrainConfig, world: World, stop: StopSignals, folder: Path, pairs: int) -> dict:
    """Relative time of off over a model built without balancing, from interleaved turns, with a 95 % interval."""
    small: dict[str, Any] = {
        "model": config.model.model_copy(update={"num_hidden_layers": 2}),
        "train": config.train.model_copy(update={"compile": False}),
    }
    with_off = Bench(config.model_copy(update=small), world, stop, folder / "off")
    absent = Bench(config.model_copy(update=small | {"balance": None}), world, stop, folder / "absent")
    model, ep = config.model, with_off.trainer.plan.axes.ep
    even = Workload("balanced", 1.0, model.num_experts, model.num_experts_per_tok, ep)
    modes = [Mode("off", bench.dispatcher("symmetric", model.num_experts, 0), None) for bench in (with_off, absent)]
    for bench, mode in zip((with_off, absent), modes):
        bench.turn(mode, even, even, 1)
    ratios = []
    for index in range(pairs):
        order = ((with_off, modes[0]), (absent, modes[1]))
        times = {}
        for bench, mode in order if index % 2 else order[::-1]:
            times[bench] = statistics.median(bench.turn(mode, even, even, PAIR_STEPS, warm_up=1)["ms"])
        ratios.append(times[with_off] / times[absent] - 1)
    for bench in (with_off, absent):
        bench.close()
    half = 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    mean = statistics.fmean(ratios)
    return {"mean": mean, "low": mean - half, "high": mean + half, "pairs": pairs}


def summarize(rows: list[dict[str, Any]], off_overhead: dict[str, float]) -> dict[str, Any]:
    """The figures that the project promises, of the worst workload each."""
    of = {(row["workload"], row["imbalance"], row["mode"]): row for row in rows}
    cases = list(dict.fromkeys((row["workload"], row["imbalance"]) for row in rows))
    rate = lambda case, mode: of[*case, mode]["tokens_per_second"]  # noqa: E731
    memory = lambda case, mode: of[*case, mode]["memory_peak_bytes"]  # noqa: E731
    if not cases:
        return {"off_overhead": off_overhead}
    return {
        "on_over_forced_min": min(rate(case, "on") / rate(case, "forced") for case in cases),
        "on_over_off_max": max(rate(case, "on") / rate(case, "off") for case in cases),
        "on_over_forced": {f"{case[0]} {case[1]}": rate(case, "on") / rate(case, "forced") for case in cases},
        "memory_on_over_off": {
            f"{case[0]} {case[1]}": memory(case, "on") / memory(case, "off, all_to_all") for case in cases
        },
        "off_overhead": off_overhead,
    }


def benchmark_config(recipe: str, layers: int, real_text: bool = False) -> TrainConfig:
    """A recipe with another number of layers (0: its own), on random tokens or its own text."""
    config = load_config(TrainConfig, recipe)
    changes: dict[str, Any] = {}
    if layers:
        changes["model"] = config.model.model_copy(update={"num_hidden_layers": layers})
    if not real_text:
        changes["data"] = DataConfig(source="random", eval_fraction=0.0)
    return config.model_copy(update=changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=44)
    parser.add_argument("--recipe", default="h200-ep2")
    parser.add_argument("--cases", nargs="*", default=[], help="such as hot_rank:1.9, or none; all by default")
    parser.add_argument(
        "--weighs-rows", action=argparse.BooleanOptionalAction, help="dispatch.weighs_rows, in all symmetric modes"
    )
    options = parse_options(parser)
    config = benchmark_config(options.recipe, options.layers)
    chosen = config.dispatch.model_copy(update={"weighs_rows": options.weighs_rows})
    config = config.model_copy(update={"dispatch": chosen})
    folder = Path(tempfile.mkdtemp())
    with StopSignals() as stop, join_world(get_accelerator(), 120.0) as world:
        plan = plan_run(config, world.size)
        torch.manual_seed(0)
        copy_tokens = measure_copy_tokens(config, plan, world)
        model = config.model
        hot = Workload("hot_rank", 1.9, model.num_experts, model.num_experts_per_tok, plan.axes.ep)
        assert config.balance is not None
        tokens = plan.micro_batch_size * config.train.sequence_length
        slots = max(1, slots_for(hot, tokens, config.balance, copy_tokens))
        if world.rank == 0:
            print(f"a copy costs {copy_tokens} tokens; slots for the hot rank: {slots}", flush=True)
        bench = Bench(config, world, stop, folder / "main")
        name = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
        out = results_file(options, f"balance-{device_word(name)}-ep{plan.axes.ep}.json")
        hardware = {"device": name, "devices": world.size, "copy_tokens": copy_tokens}

        def save(rows: list[dict[str, Any]], overhead: dict[str, float] | None = None) -> None:
            if world.rank == 0:
                summary = summarize(rows, overhead or {})
                print(summary, write_results(out, rows, summary, ("torch", "triton"), hardware), flush=True)

        rows = measure(bench, options.steps, options.rounds, slots, tuple(options.cases), save)
        bench.close()
        del bench
        if options.pairs:
            save(rows, compare_off_with_absent(config, world, stop, folder, options.pairs))


if __name__ == "__main__":
    main()
