"""What a load trace costs: steps that are recorded against steps that are not, in one run on two CPU cores (EP 2).

    python benchmarks/trace_overhead.py [--pairs 30] [--ranks 2] [--recipe demo] [-- SETTINGS]

Blocks of 10 steps take turns: all recorded (one of them with matrices, as one in ten recorded steps is by default), the
files written at the block's end and waited for; and none recorded. By default one step in ten is recorded, so the
overhead is a tenth of the blocks' relative difference; the median over pairs of neighbouring blocks is
`trace_overhead` in benchmarks/results/observe.json (on GPUs, under a launcher, `trace_overhead_gpu`); with --replace in
the file that is there, whose other keys stay.
On the CPU one core is pinned per rank. Balancing is on, but with one rank, which has nobody to balance with.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist

from equipoise import launch
from equipoise.accelerator import get_accelerator
from equipoise.bench.results import parse_options, results_file, update_results
from equipoise.data import build_dataset
from equipoise.distributed.agree import gather_json
from equipoise.distributed.world import join_world
from equipoise.observe.config import TraceConfig
from equipoise.observe.reader import open_trace
from equipoise.train.config import TrainConfig
from equipoise.train.load import load_config
from equipoise.train.log import configure_logging
from equipoise.train.stop import StopSignals
from equipoise.train.trace import make_recorder
from equipoise.train.trainer import Trainer

BLOCK = 10
DEFAULT = TraceConfig()
SETTINGS = ["--data.source", "random", "--data.eval-fraction", "0"]
BALANCED = ["--balance.num-redundant-experts-per-rank", "1"]


def measure(config: TrainConfig, pairs: int, out: Path) -> None:
    """On a rank. Collective."""
    configure_logging()
    accelerator = get_accelerator()
    on_cpu = accelerator.device_type == "cpu"
    if on_cpu:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["LOCAL_RANK"])]})
    with (
        StopSignals() as stop,
        join_world(accelerator, config.parallel.timeout_s) as world,
        tempfile.TemporaryDirectory() as folder,
    ):
        loop = config.train
        datasets = build_dataset(config.data, loop.sequence_length, vocab_size=config.model.vocab_size, seed=loop.seed)
        trainer = Trainer(config, world, datasets, Path(folder), stop)
        runner, number = trainer.step_runner, 0
        shared = Path(gather_json(folder, world)[0])
        trace = make_recorder(config, trainer.plan, world, runner, trainer.dtype, shared, 0)
        tokens = loop.global_batch_size * loop.sequence_length

        def block(recorded: bool) -> float:
            nonlocal number
            dist.barrier(group=trainer.meshes.world_group)
            started = time.perf_counter()
            for _ in range(BLOCK):
                number += 1
                trainer.timer.start_step()
                if recorded:
                    trace.begin(number)
                sums, counts = runner.forward_backward(trainer.loader.next_step(), tokens)
                result, norm = runner.reduce(sums, counts, tokens, stop=False)
                runner.update(result, norm, lr=1e-4)
                if recorded:
                    trace.end()
                trainer.timer.finish_step()
            if recorded:
                trace.flush()
                trace.wait()
            return max(gather_json(time.perf_counter() - started, world))

        with world.operation("trace_overhead", deadline_s=3600):
            block(True), block(False)
            found = []
            for pair in range(pairs):
                order = (True, False) if pair % 2 else (False, True)
                seconds = {recorded: block(recorded) for recorded in order}
                found.append((seconds[True], seconds[False]))
        trainer.loader.close()
        trace.close()
        if world.rank == 0:
            check(shared)
            rows = [{"part": "trace_overhead", "recorded_s": a, "plain_s": b, "steps": BLOCK} for a, b in found]
            of_recorded = statistics.median(a / b - 1 for a, b in found)
            key = "trace_overhead" if on_cpu else "trace_overhead_gpu"
            summary = {key: of_recorded / DEFAULT.every}
            rows = [{**row, "part": key, "device": accelerator.device_name()} for row in rows]
            step_ms = 1e3 * statistics.median(b for _, b in found) / BLOCK
            print(json.dumps(summary | {"of_a_recorded_step": of_recorded, "plain_step_ms": step_ms}))
            print("written to", update_results(out, [key], rows, summary, ["torch", "equipoise", "pyarrow"]))


def check(folder: Path) -> None:
    """What was copied is whole: every recorded step is there, and its parts add up."""
    trace = open_trace(folder)
    number = 0
    for load in trace.loads():
        assert load.load_PE is not None
        assert load.delivered_Pm is not None
        assert load.load_PE.sum() == load.rank_load_P.sum() == load.delivered_Pm.sum()
        assert (load.delivered_Pm.sum(1) == load.rank_load_after_P).all()
        assert (load.delivered_Pm == load.quota_Pm).all()
        number += 1
    steps = trace.steps()
    info = trace.info
    assert number == len(trace.steps(with_matrices=True)) * info.num_layers * info.num_microbatches * info.num_groups
    print(f"{len(steps)} recorded steps, {number} matrices: all add up")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("settings", nargs="*", help="settings of the recipe, after --")
    options = parse_options(parser)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sampling = ["--trace.every", "1", "--trace.matrices-every", str(DEFAULT.matrices_every // DEFAULT.every)]
    sampling += ["--trace.sequences-every", "0"]
    sizes = BALANCED if options.ranks > 1 else ["--parallel.ep-size", "1"]
    config = load_config(TrainConfig, options.recipe, [*SETTINGS, *sizes, *sampling, *options.settings])
    config.check_world(options.ranks)
    if launch.has_launcher(os.environ):
        if launch.is_own_worker(os.environ):
            launch.end_with_parent()
        measure(config, options.pairs, results_file(options, "observe.json"))
    else:
        launch.launch(options.ranks, [sys.executable, __file__, *sys.argv[1:]])


if __name__ == "__main__":
    main()
