"""The simulator against measured training steps: EP 2 on two CPU cores, W0 to W7, balancing off, on and forced.

    python benchmarks/simulate_cpu.py [--minutes 12]

One core is pinned per rank. Calibration loads and the workloads take turns in the same rounds; what is the same work
under several names (perfectly even routing, mostly) is measured once in a round. The rates are fitted
to the calibration loads alone (those of `equipoise bench calibrate`); then `simulate` predicts every workload and mode
from the loads that were laid down. Writes rows and `simulate_error_max`, the largest relative error of a predicted
step, into benchmarks/results/observe.json; with --replace into the file that is there, whose other keys stay. The
calibration, which `simulate` can read, goes to calibrations/cpu-ep2.json beside it.

On GPUs, under a launcher: `--raw FILE --recipe qwen3-30b-a3b -- SETTINGS` measures, `--from FILE --name NAME` fits and
predicts anywhere; the key is then `simulate_error_max_NAME`.
"""

import argparse
import functools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from equipoise import launch
from equipoise.accelerator import get_accelerator
from equipoise.balance.config import planner_settings
from equipoise.bench.balance import FORCED, OFF, ON
from equipoise.bench.calibrate_run import (
    Load,
    Stopwatch,
    calibration_loads,
    check_study,
    describe_sizes,
    expert_size,
    fit_hardware,
    middle_mean,
    num_moe_layers,
    predict,
    study_of,
    tokens_per_rank,
    unfitted,
)
from equipoise.bench.results import free_unless, parse_options, results_file, update_results
from equipoise.data import build_dataset
from equipoise.distributed.world import join_world
from equipoise.moe.synthetic import BURST_EVERY, WORKLOADS, Workload
from equipoise.simulate.hardware import Hardware
from equipoise.simulate.loads import exact_loads
from equipoise.simulate.run import simulate, summarize
from equipoise.train.config import TrainConfig
from equipoise.train.load import load_config
from equipoise.train.log import configure_logging
from equipoise.train.stop import StopSignals
from equipoise.train.trainer import Trainer

RECIPE = Path(__file__).with_name("balance-cpu.toml")
SETTINGS = [
    *("--balance.num-redundant-experts-per-rank", "4"),
    *("--model.num-experts-per-tok", "4", "--train.global-batch-size", "16"),
]
IMBALANCE = 1.6
STEPS = {"burst": BURST_EVERY, "rotating": 2}
CPU = "cpu-ep2"


def make_workload(name: str, config: TrainConfig) -> Workload:
    """A workload at the imbalance that its sizes can have."""
    model = config.model
    make = functools.partial(Workload, name, num_experts=model.num_experts, num_ranks=2)
    largest = make(imbalance=1.0, num_experts_per_tok=model.num_experts_per_tok).largest_imbalance
    return make(imbalance=min(IMBALANCE, largest), num_experts_per_tok=model.num_experts_per_tok)


def workload_loads(config: TrainConfig) -> list[Load]:
    """Every workload in every mode, step by step."""
    model = config.model
    loads = []
    for name in WORKLOADS:
        workload = make_workload(name, config)
        even = Workload("balanced", 1.0, model.num_experts, model.num_experts_per_tok, 2).shares()
        laid = [[workload.routing(step, rank) for rank in range(2)] for step in range(STEPS.get(name, 1))]
        forced = [[replace(routing, shares_E=even) for routing in ranks] for ranks in laid]
        forced = forced if any(ranks != forced[0] for ranks in forced) else forced[:1]
        loads += [Load(f"{name}, {mode}", mode, forced if mode == FORCED else laid) for mode in (OFF, ON, FORCED)]
    return loads


def predicted(name: str, mode: str, config: TrainConfig, tokens: int, hardware: Hardware) -> dict:
    """What `simulate` says of a workload's steps."""
    expert = expert_size(config)
    workload = make_workload(name, config)
    assert config.balance is not None
    settings = planner_settings(config.balance)
    blocks = exact_loads(workload, tokens, num_moe_layers(config), STEPS.get(name, 1))
    planner = {OFF: "off", ON: config.balance.planner, FORCED: "forced"}[mode]
    frame = simulate(blocks, planner, settings, hardware=hardware, expert=expert)
    return summarize(frame, hardware, expert, settings.num_slots)


def measure(config: TrainConfig, minutes: float, raw: Path) -> None:
    """On a rank: rounds until the time is over; rank 0 writes the seconds. Collective."""
    configure_logging()
    accelerator = get_accelerator()
    if accelerator.device_type == "cpu":
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["LOCAL_RANK"])]})
    with StopSignals() as stop, join_world(accelerator, config.parallel.timeout_s) as world:
        loop = config.train
        datasets = build_dataset(config.data, loop.sequence_length, vocab_size=config.model.vocab_size, seed=loop.seed)
        trainer = Trainer(config, world, datasets, raw.parent, stop)
        try:
            with world.operation("simulate_cpu", deadline_s=3600):
                watch = Stopwatch(trainer, study_of(config))
                loads = all_loads(config)
                names = set(same_work(loads).values())
                measured = watch.turns([x for x in loads if x.name in names], rounds=1000, deadline_s=60 * minutes)
        finally:
            trainer.loader.close()
        if world.rank == 0:
            itemsize = trainer.dtype.itemsize
            content = {"device": world.accelerator.device_name(), "itemsize": itemsize, "seconds": measured}
            raw.write_text(json.dumps(content | {"config": config.model_dump(mode="json")}))


def all_loads(config: TrainConfig) -> list[Load]:
    """The calibration's, then the workloads'."""
    model = config.model
    return calibration_loads(2, model.num_experts, model.num_experts_per_tok) + workload_loads(config)


def same_work(loads: list[Load]) -> dict[str, str]:
    """Of each load, the name of the first that is the same work: forced is off, with what was laid down."""
    first: list[Load] = []
    found = {}
    for load in loads:
        same = (x for x in first if (x.mode == ON) == (load.mode == ON) and x.routings == load.routings)
        known = next(same, load)
        first += [load] if known is load else []
        found[load.name] = known.name
    return found


def write(raw: Path, name: str, out: Path, replace_calibration: bool) -> None:
    """Fits, predicts, prints and writes the results."""
    content = json.loads(raw.read_text())
    config, measured = TrainConfig.model_validate_json(json.dumps(content["config"])), content["seconds"]
    precision = {2: "bfloat16", 4: "float32"}[content["itemsize"]]
    config = config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})
    loads = all_loads(config)
    workloads = workload_loads(config)
    calibration = loads[: len(loads) - len(workloads)]
    measured = {load: measured[known] for load, known in same_work(loads).items()}
    seconds = {load: middle_mean(values) for load, values in measured.items()}
    tokens = tokens_per_rank(config, 2)
    source = f"measured on 2 x {content['device']} by benchmarks/simulate_cpu.py"
    hardware = fit_hardware(calibration, seconds, config, 2, unfitted(name, source, name == CPU))
    hardware = replace(hardware, measured_with=describe_sizes(config, 2))
    parts = [f"calibration {name}", f"simulate {name}"]
    rows = []
    for load in calibration:
        fitted = predict(load, config, tokens, hardware)
        rows.append({"part": parts[0], "load": load.name, "fitted_s": fitted})
    for load in workloads:
        workload, mode = load.name.split(", ")
        found = predicted(workload, mode, config, tokens, hardware)
        rows.append({"part": parts[1], "workload": workload, "mode": mode, "predicted_s": found["step_s"]})
    for row, load in zip(rows, loads):
        guess = row.get("fitted_s", row.get("predicted_s"))
        values = measured[load.name]
        row |= {"measured_s": seconds[load.name], "spread": max(values) / min(values) - 1, "rounds": len(values)}
        row["error"] = guess / row["measured_s"] - 1
        print(f"{load.name:32} {row['measured_s'] * 1e3:9.2f} ms, predicted {guess * 1e3:9.2f} ms {row['error']:+7.1%}")
    worst = max(abs(row["error"]) for row in rows if row["part"] == parts[1])
    calibration_file = free_unless(replace_calibration, out.parent / "calibrations" / f"{name}.json")
    calibration_file.parent.mkdir(exist_ok=True)
    calibration_file.write_text(hardware.to_json())
    key = "simulate_error_max" if name == CPU else f"simulate_error_max_{name}"
    update_results(out, parts, rows, {key: worst}, ["torch", "equipoise", "numba", "scipy"])
    print(json.dumps({key: worst, "rounds": len(values)}), f"\nwritten to {out} and {calibration_file}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--name", default=CPU, help="of the machine, in the results")
    parser.add_argument("--recipe", default=str(RECIPE))
    parser.add_argument("--raw", type=Path, help="measure only, and write the seconds here")
    parser.add_argument("--from", dest="from_raw", type=Path, help="fit and predict from such a file")
    parser.add_argument("settings", nargs="*", help="settings of the recipe, after --")
    options = parse_options(parser)
    out = results_file(options, "observe.json")
    if options.from_raw is not None:
        write(options.from_raw, options.name, out, options.replace)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    own = SETTINGS if options.recipe == str(RECIPE) else []
    config = check_study(load_config(TrainConfig, options.recipe, [*own, *options.settings]), 2)
    raw = options.raw or out.with_suffix(".raw.json")
    raw.parent.mkdir(parents=True, exist_ok=True)
    if launch.has_launcher(os.environ):
        if launch.is_own_worker(os.environ):
            launch.end_with_parent()
        measure(config, options.minutes, raw)
        return
    launch.launch(2, [sys.executable, __file__, *sys.argv[1:]])
    if options.raw is None:
        write(raw, options.name, out, options.replace)
        raw.unlink()


if __name__ == "__main__":
    main()
