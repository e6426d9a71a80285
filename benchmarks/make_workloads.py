"""Writes the public workload files: W0 to W7 as load traces of their own, and what training runs recorded.

    python benchmarks/make_workloads.py [--run runs/demo]... [--replace]

Into benchmarks/workloads/: `W2-hot_rank/` and so on, 8 ranks x 64 experts, 8 of them per token, 4,096 tokens of each
rank, 8 steps, as `[synthetic_routing]` lays them down; and for each --run its trace's rows with matrices and sequences,
under the run folder's name. docs/traces.md describes the files; a folder that is there is replaced only with --replace.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from equipoise.moe.synthetic import WORKLOADS, Workload
from equipoise.observe.reader import open_trace
from equipoise.observe.schema import LAYERS, LAYERS_SCHEMA, SEQUENCES, TraceInfo
from equipoise.observe.tables import LayerRows, schema_with
from equipoise.observe.writer import TraceWriter, write_file
from equipoise.simulate.loads import exact_loads

OUT = Path(__file__).with_name("workloads")
RANKS, EXPERTS, TOP_K, TOKENS, STEPS, IMBALANCE = 8, 64, 8, 4096, 8, 1.5


def workload_folder(number: int, name: str) -> str:
    return f"W{number}-{name}"


def write_workload(number: int, name: str) -> Path:
    """One workload's trace: one layer, one microbatch in each step."""
    largest = Workload(name, 1.0, EXPERTS, TOP_K, RANKS).largest_imbalance
    workload = Workload(name, min(IMBALANCE, largest), EXPERTS, TOP_K, RANKS)
    folder = OUT / workload_folder(number, name)
    shutil.rmtree(folder, ignore_errors=True)
    with TraceWriter(folder, TraceInfo(1, EXPERTS, TOP_K, RANKS, workload=name)) as writer:
        for block in exact_loads(workload, TOKENS, num_layers=1, num_steps=STEPS):
            home_LPM = block.load_NE.reshape(1, RANKS, -1)
            writer.write_layers(LayerRows(block.step + 1, 0, 0, block.load_NPE.astype(np.int64), home_LPM))
    return folder


def write_run(run: Path) -> Path:
    """A run's recorded matrices and sequences."""
    trace = open_trace(run)
    folder = OUT / run.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    layers = trace.layers(LAYERS_SCHEMA.names)
    for table, rows in ((LAYERS, layers.filter(pc.is_valid(layers["load"]))), (SEQUENCES, trace.sequences())):
        if rows.num_rows:
            whole = pa.Table.from_batches(rows.to_batches(), rows.schema)
            path = folder / f"{table}-00000-{rows['step'][0].as_py():09d}-0.parquet"
            write_file(path, whole.replace_schema_metadata(schema_with(trace.info, table).metadata))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, action="append", default=[], help="a run folder with a trace")
    parser.add_argument("--replace", action="store_true", help="write over the folders that are there")
    options = parser.parse_args()
    names = [
        *(workload_folder(number, name) for number, name in enumerate(WORKLOADS)),
        *(run.name for run in options.run),
    ]
    there = [name for name in names if (OUT / name).exists()]
    if there and not options.replace:
        parser.error(f"{OUT} has {', '.join(there)} already; give --replace to write over them")
    folders = [write_workload(number, name) for number, name in enumerate(WORKLOADS)]
    folders += [write_run(run) for run in options.run]
    for folder in folders:
        print(f"{folder.name:24} {sum(file.stat().st_size for file in folder.iterdir()):8} bytes")


if __name__ == "__main__":
    main()
