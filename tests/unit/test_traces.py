"""Load traces: written whole, read back, refused with a message when they are not what they should be."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from trace_rows import INFO, rows

from equipoise.accelerator import CPUAccelerator
from equipoise.errors import TraceError
from equipoise.moe.synthetic import WORKLOADS, Workload
from equipoise.observe import writer as writer_module
from equipoise.observe.config import TraceConfig
from equipoise.observe.reader import open_trace
from equipoise.observe.recorder import LoadRecorder
from equipoise.observe.schema import LAYERS, LAYERS_SCHEMA, SCHEMA_NAME, TraceInfo
from equipoise.observe.tables import LayerRows, schema_with
from equipoise.observe.writer import TraceWriter, prepare_folder, write_file


def write(folder: Path, *batches: LayerRows, info: TraceInfo = INFO) -> None:
    with TraceWriter(folder, info) as writer:
        for batch in batches:
            writer.write_layers(batch)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written = rows(7)
    write(tmp_path / "trace", rows(6), written)
    trace = open_trace(tmp_path)
    assert trace.info == INFO
    assert trace.steps() == [6, 7]
    layer = trace.load(step=7, layer=2)
    load = written.load_LPE[2]
    assert np.array_equal(layer.load_PE, load)
    assert layer.rank_load_P.tolist() == [load[:, :3].sum(), load[:, 3:].sum()]
    assert layer.rank_load_after_P.tolist() == written.delivered_LPm[2].sum(1).tolist()
    assert layer.slot_expert_PR.tolist() == [[-1], [0]]
    assert np.array_equal(layer.quota_Pm, written.delivered_LPm[2])
    assert np.array_equal(layer.seconds_PF, written.seconds_LPF[2])
    assert (layer.copies, layer.copied_bytes) == (1, 1000)
    table = trace.layers(["layer", "rank_imbalance", "rank_imbalance_after"], steps=(7, 7))
    before = layer.rank_load_P
    assert table["layer"].to_pylist() == [0, 1, 2]
    assert table["rank_imbalance"][2].as_py() == pytest.approx(before.max() / before.mean())


@pytest.mark.parametrize("ep_size", [1, 2, 3, 6])
def test_without_balancing_every_expert_is_at_home(tmp_path: Path, ep_size: int) -> None:
    info = TraceInfo(num_layers=1, num_experts=6, num_experts_per_tok=2, ep_size=ep_size)
    load = np.arange(6 * ep_size).reshape(1, ep_size, 6)
    home = load.sum(1).reshape(1, ep_size, -1)
    write(tmp_path, LayerRows(1, 0, 0, load, home), info=info)
    layer = open_trace(tmp_path).load(1, 0)
    assert layer.slot_expert_PR.shape == (ep_size, 0)
    assert np.array_equal(layer.quota_Pm, home[0])
    assert layer.copies == 0
    assert layer.seconds_PF is None


def test_no_tokens_is_an_imbalance_of_one(tmp_path: Path) -> None:
    info = TraceInfo(num_layers=1, num_experts=4, num_experts_per_tok=2, ep_size=2)
    write(tmp_path, LayerRows(1, 0, 0, np.zeros((1, 2, 4)), np.zeros((1, 2, 2))), info=info)
    assert open_trace(tmp_path).layers(["rank_imbalance"])["rank_imbalance"].to_pylist() == [1.0]


def test_layers_are_never_pooled(tmp_path: Path) -> None:
    """C06: each layer sends everything to one expert, another one in each; pooled they would look even."""
    info = TraceInfo(num_layers=2, num_experts=2, num_experts_per_tok=1, ep_size=2)
    load = np.array([[[2, 0], [2, 0]], [[0, 2], [0, 2]]])
    write(tmp_path, LayerRows(1, 0, 0, load, load.sum(1)[:, :, None]), info=info)
    table = open_trace(tmp_path).layers()
    assert table["rank_imbalance"].to_pylist() == [2.0, 2.0]
    assert table["rank_load"].to_pylist() == [[4, 0], [0, 4]]


def test_matrices_are_null_where_only_loads_were_recorded(tmp_path: Path) -> None:
    write(tmp_path, rows(1, has_matrices=False), rows(2))
    trace = open_trace(tmp_path)
    assert trace.load(1, 0).load_PE is None
    assert trace.load(1, 0).rank_load_P.shape == (2,)
    assert trace.steps(with_matrices=True) == [2]
    assert [load.step for load in trace.loads()] == [2, 2, 2]


def test_sequences_are_read_back(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(0, 9, (3, 4, 6))
    with TraceWriter(tmp_path, INFO) as writer:
        writer.write_layers(rows(1))
        writer.write_sequences(1, 0, 0, 1, counts)
    table = open_trace(tmp_path).sequences(layer=1)
    assert table["sequence"].to_pylist() == [0, 1, 2, 3]
    assert table["counts"].to_pylist() == counts[1].tolist()


def test_files_are_closed_by_size_and_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(writer_module, "FILE_BYTES", 700)
    writer = TraceWriter(tmp_path, INFO, clock=lambda: now)
    for step in range(1, 6):
        writer.write_layers(rows(step))
    by_size = len(list(tmp_path.glob("*.parquet")))
    assert by_size >= 2
    monkeypatch.setattr(writer_module, "FILE_BYTES", 2**30)
    writer.flush()
    by_size = len(list(tmp_path.glob("*.parquet")))
    now = 9.0
    writer.write_layers(rows(6))
    assert len(list(tmp_path.glob("*.parquet"))) == by_size, "10 s have not passed"
    now = 11.0
    writer.write_layers(rows(7))
    assert len(list(tmp_path.glob("*.parquet"))) == by_size + 1
    assert open_trace(tmp_path).steps() == [1, 2, 3, 4, 5, 6, 7]
    now = 10_000.0
    writer.write_layers(rows(8))
    now += 150  # 2 % of the run have not passed
    writer.write_layers(rows(9))
    assert len(list(tmp_path.glob("*.parquet"))) == by_size + 2


KILLED = """
import sys
sys.path[:0] = {path!r}
import numpy as np
from equipoise.observe import writer
from trace_rows import INFO, rows
writer.FILE_BYTES = 1
out = writer.TraceWriter(sys.argv[1], INFO)
for step in range(1, 10_000):
    out.write_layers(rows(step))
    print(step, flush=True)
"""


def test_a_killed_run_leaves_a_readable_trace(tmp_path: Path) -> None:
    program = textwrap.dedent(KILLED).format(path=sys.path)
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = 0
        while said < 20:
            said = int(process.stdout.readline())
        time.sleep(0.003)  # somewhere within a file
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    (tmp_path / "layers-0000-000099999-0.parquet.tmp").write_bytes(b"PAR1 and then the kill")
    trace = open_trace(tmp_path)
    steps = trace.steps()
    assert steps[:20] == list(range(1, 21))
    assert trace.load(20, 1).load_PE.tolist() == rows(20).load_LPE[1].tolist()
    prepare_folder(tmp_path, INFO, resumed_step=20)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_running_trace_is_followed(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, INFO)
    writer.write_layers(rows(1))
    writer.flush()
    trace = open_trace(tmp_path)
    assert not trace.refresh()
    writer.write_layers(rows(2))
    assert not trace.refresh()
    writer.flush()
    assert trace.refresh()
    assert trace.steps() == [1, 2]


def test_a_resumed_run_cuts_off_what_it_trains_again(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    write(folder, rows(1), rows(2), rows(3))
    write(folder, rows(4))
    prepare_folder(folder, INFO, resumed_step=2)
    assert open_trace(folder).steps() == [1, 2]
    write(folder, rows(3))
    assert open_trace(folder).steps() == [1, 2, 3]


@pytest.mark.parametrize("resumed_step", [0, 1])
def test_another_run_keeps_the_earlier_trace(tmp_path: Path, resumed_step: int) -> None:
    folder = tmp_path / "trace"
    other = TraceInfo(num_layers=3, num_experts=6, num_experts_per_tok=2, ep_size=2, num_slots=2)
    for _ in range(2):
        write(folder, rows(1))
        prepare_folder(folder, INFO if resumed_step == 0 else other, resumed_step)
    assert not folder.exists()
    assert open_trace(tmp_path / "trace-previous").steps() == [1]
    assert open_trace(tmp_path / "trace-previous-2").steps() == [1]


def good_table(info: TraceInfo = INFO) -> pa.Table:
    table = pa.Table.from_batches([rows(1, info).batch(info)])
    return table.replace_schema_metadata(schema_with(info, LAYERS).metadata)


def replaced(name: str, value: object) -> pa.Table:
    table = good_table()
    key = b"equipoise"
    return table.replace_schema_metadata({key: table.schema.metadata[key].replace(name.encode(), str(value).encode())})


def empty_folder(path: Path) -> None:
    path.mkdir()


def no_bytes(path: Path) -> None:
    path.mkdir()
    (path / "layers-0000-000000001-0.parquet").touch()


def cut(path: Path) -> None:
    write(path, rows(1))
    (file,) = path.glob("*.parquet")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def with_table(table: pa.Table, name: str = "layers-0000-000000001-0.parquet"):
    def make(path: Path) -> None:
        path.mkdir()
        write_file(path / name, table)

    return make


def mixed(path: Path) -> None:
    write(path, rows(1))
    other = TraceInfo(num_layers=3, num_experts=6, num_experts_per_tok=2, ep_size=3, num_slots=1)
    with_table(good_table(other), "layers-0001-000000001-0.parquet")(path / "sub")
    (path / "sub" / "layers-0001-000000001-0.parquet").rename(path / "layers-0001-000000001-0.parquet")


BAD = {
    "no folder": (lambda path: None, "no such file or folder"),
    "empty folder": (empty_folder, "no file of a load trace"),
    "no bytes": (no_bytes, "is empty: 0 bytes"),
    "cut": (cut, "not a whole Parquet file"),
    "foreign": (with_table(pa.table({"a": [1]})), "not of a load trace"),
    "other metadata": (with_table(replaced(SCHEMA_NAME, "somebody.else")), "not of a load trace"),
    "other version": (with_table(replaced('"version": 1', '"version": 99')), "version 99.*reads version 1"),
    "impossible sizes": (with_table(replaced('"ep_size": 2', '"ep_size": 4')), "impossible or missing sizes"),
    "unknown table": (with_table(replaced('"layers"', '"lawyers"')), "a table 'lawyers'"),
    "missing column": (
        with_table(good_table().drop_columns(["rank_load", "copies"])),
        "lacks columns.*copies, rank_load",
    ),
    "other type": (
        with_table(good_table().set_column(0, "step", pa.array([1.0] * 3))),
        "other types.*step is double, not int32",
    ),
    "no rows": (with_table(good_table().slice(0, 0)), "no file of a load trace .* with rows in it"),
    "two traces": (mixed, "of another trace"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_traces_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    make, message = BAD[name]
    make(tmp_path / "trace")
    with pytest.raises(TraceError, match=message):
        open_trace(tmp_path / "trace")


def test_files_that_another_program_wrote_without_statistics_are_read(tmp_path: Path) -> None:
    write(tmp_path, rows(10), rows(20))
    for file in tmp_path.glob("*.parquet"):
        pq.write_table(pq.read_table(file), file, write_statistics=False, row_group_size=1)
    trace = open_trace(tmp_path)
    assert trace.steps() == [10, 20]
    assert trace.load(20, 0).step == 20
    assert set(trace.layers(steps=(10, 10))["step"].to_pylist()) == {10}


def test_a_row_that_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, rows(10), rows(20))
    with pytest.raises(TraceError, match=r"no row of step 11, layer 0.*recorded steps near that are 10, 20"):
        open_trace(tmp_path).load(11, 0)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("a file")
    with pytest.raises(TraceError, match="cannot write"):
        TraceWriter(tmp_path / "trace", INFO)


def test_any_reader_of_parquet_sees_the_documented_columns(tmp_path: Path) -> None:
    write(tmp_path, rows(1))
    (file,) = tmp_path.glob("*.parquet")
    page = (Path(__file__).parents[2] / "docs" / "traces.md").read_text()
    table = pq.read_table(file)
    assert table.schema.names == LAYERS_SCHEMA.names
    assert [name for name in table.schema.names if f"`{name}`" not in page] == []
    frame = pandas.read_parquet(file)
    assert np.array_equal(np.stack(frame["load"]).reshape(3, 2, 6), rows(1).load_LPE)


WORKLOADS_FOLDER = Path(__file__).parents[2] / "benchmarks" / "workloads"


@pytest.mark.parametrize(("number", "name"), list(enumerate(WORKLOADS)))
def test_the_public_workload_files_hold_what_training_lays_down(number: int, name: str) -> None:
    trace = open_trace(WORKLOADS_FOLDER / f"W{number}-{name}")
    assert trace.info.workload == name
    assert trace.steps() == list(range(1, 9))
    workload = Workload(name, 1.5, 64, 8, 8)
    for step in (1, 4):
        routings = [workload.routing(step - 1, rank) for rank in range(8)]
        assert trace.load(step, 0).load_PE.tolist() == [routing.expert_counts(4096) for routing in routings]


def test_the_public_trace_of_the_demo_is_whole() -> None:
    trace = open_trace(WORKLOADS_FOLDER / "demo")
    assert (trace.info.ep_size, trace.info.num_experts, trace.info.num_layers) == (2, 8, 4)
    assert len(trace.steps(with_matrices=True)) == 15
    assert trace.sequences().num_rows == 3 * 4 * 16


class Layer:
    """A MoE layer as far as a recorder knows it."""

    observer = None


def test_steps_are_sampled_and_others_see_no_observer(tmp_path: Path) -> None:
    config = TraceConfig(every=3, matrices_every=6)
    layers = [Layer(), Layer()]
    recorder = LoadRecorder(config, INFO, layers, tmp_path, CPUAccelerator(), torch.device("cpu"))
    recorded = []
    for step in range(1, 10):
        assert all(layer.observer is None for layer in layers)
        if recorder.begin(step):
            recorded.append(step)
            assert all(layer.observer is not None for layer in layers)
        recorder.end()  # no forward has run
    recorder.close()
    assert recorded == [3, 6, 9]


def test_a_folder_that_cannot_be_written_ends_the_recording_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise TraceError("cannot write trace: no space left on device")

    monkeypatch.setattr(TraceWriter, "flush", refuse)
    recorder = LoadRecorder(TraceConfig(), INFO, [Layer()], tmp_path, CPUAccelerator(), torch.device("cpu"))
    for _ in range(20):
        recorder.flush()
    recorder.close()
    assert [record.message for record in caplog.records] == [
        "the load trace ends here, the run goes on: cannot write trace: no space left on device"
    ]


@pytest.mark.parametrize("setting", ["matrices_every", "sequences_every"])
def test_intervals_that_never_meet_are_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"trace\.{setting} is 25.*no multiple of trace\.every 10: choose 20"):
        TraceConfig(every=10, **{setting: 25})
