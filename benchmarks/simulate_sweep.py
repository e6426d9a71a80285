"""How long a sweep takes: 64 ranks x 256 experts x 60 layers x 1,000 microbatches, off, on and forced.

    python benchmarks/simulate_sweep.py [--microbatches 1000]

Every layer and microbatch has a load of its own. Checks that plans equal the public planner's, bit for bit, for some of
the loads, and writes `sweep_s` into benchmarks/results/observe.json; with --replace into the file that is there, whose
other keys stay.
"""

import argparse
import json
import time

import numpy as np
import torch

from equipoise.balance import ExactLoadPlanner, PlannerSettings
from equipoise.bench.results import parse_options, results_file, update_results
from equipoise.simulate.hardware import ExpertSize, load_hardware
from equipoise.simulate.loads import drawn_loads
from equipoise.simulate.sweep import Sweep, run_sweep

RANKS, EXPERTS, TOP_K, TOKENS, LAYERS = 64, 256, 8, 4096, 60


def loads(microbatches: int, ranks: int = RANKS):
    return drawn_loads("lognormal", 1.5, EXPERTS, TOP_K, ranks, TOKENS, LAYERS, microbatches)


def differing(checked: int) -> int:
    """Loads whose plan by the batched form is not the public planner's."""
    planner, wrong = ExactLoadPlanner(), 0
    block = next(iter(loads(1)))
    for slots in (1, 2):
        settings = PlannerSettings(slots)
        load_BPE = torch.from_numpy(block.load_NPE[:checked].astype(np.int64))
        batch = planner.plan_batch(load_BPE.sum(1), RANKS, settings)
        for number, load_PE in enumerate(load_BPE):
            plan = planner(load_PE, settings)
            same = torch.equal(plan.slot_expert, batch[number].slot_expert)
            wrong += not (same and torch.equal(plan.quota, batch[number].quota))
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=1000)
    options = parse_options(parser)
    wrong = differing(LAYERS)
    assert wrong == 0, f"{wrong} plans differ from the public planner's"
    sweep = Sweep(ranks=[RANKS], slots=[1], tolerances=[0.01])
    started, cpu = time.perf_counter(), time.process_time()
    rows = run_sweep(
        sweep, lambda ranks: loads(options.microbatches, ranks), load_hardware("h200"), ExpertSize(7168, 2048)
    )
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    print(json.dumps({"sweep_s": seconds, "processor_s": cpu, "loads": rows[0]["loads"], "settings": len(rows)}))
    found = [{"part": "sweep", "microbatches": options.microbatches, "processor_s": cpu, **row} for row in rows]
    packages = ["numba", "numpy", "pandas", "torch"]
    out = results_file(options, "observe.json")
    print("written to", update_results(out, ["sweep"], found, {"sweep_s": seconds}, packages))


if __name__ == "__main__":
    main()
