"""The viewer without a browser: what it reads, what it answers, whom it answers, what it refuses."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from starlette.testclient import TestClient
from typer.testing import CliRunner, Result

from browser.sample import LAYERS, RANKS, SampleRun, make_run, write_metrics
from equipoise import cli
from equipoise.balance.planner import plan_loads
from equipoise.balance.protocol import PlannerSettings
from equipoise.balance.splits import complete_plan
from equipoise.errors import ConfigError, TraceError
from equipoise.observe.reader import open_trace
from equipoise.observe.schema import TraceInfo
from equipoise.observe.tables import LayerRows
from equipoise.observe.view.buckets import bucket_max, bucket_mean, bucket_starts, plain
from equipoise.observe.view.history import HistoryReader
from equipoise.observe.view.metrics_file import MetricsFile
from equipoise.observe.view.run import Run
from equipoise.observe.view.runs import Runs
from equipoise.observe.view.server import COOKIE, is_local, make_app, open_socket
from equipoise.observe.view.traffic import traffic
from equipoise.observe.writer import TraceWriter, prepare_folder

TOKEN = "a-token-of-the-tests"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    return make_run(tmp_path_factory.mktemp("view") / "run", [1, 2, 3, 5, 8])


def client(*paths: Path, token: str | None = None, host: str = "localhost") -> TestClient:
    return TestClient(make_app(Runs(paths), token), base_url=f"http://{host}", follow_redirects=False)


# Long series


@pytest.mark.parametrize(
    ("length", "limit", "starts"),
    [(0, 3, []), (1, 3, [0]), (3, 3, [0, 1, 2]), (4, 3, [0, 2]), (7, 3, [0, 3, 6]), (7, 1, [0])],
)
def test_buckets_are_equal_and_at_most_the_limit(length: int, limit: int, starts: list[int]) -> None:
    assert bucket_starts(length, limit).tolist() == starts


def test_buckets_pass_over_what_is_not_there() -> None:
    values = np.array([1.0, 3.0, np.nan, 5.0, np.nan, np.nan, 7.0])
    starts = np.array([0, 2, 4, 6])
    assert plain(bucket_mean(values, starts)) == [2.0, 5.0, None, 7.0]
    assert plain(bucket_max(values, starts)) == [3.0, 5.0, None, 7.0]
    assert bucket_mean(np.empty((0, 3)), np.empty(0, int)).shape == (0, 3)
    assert plain([1 / 3, float("inf")], digits=3) == [0.333, None]


# Files that grow


def test_metrics_are_read_on_from_where_they_were(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert not file.refresh()
    write_metrics(tmp_path, [{"step": 1, "loss": 2.5}])
    assert file.refresh()
    with open(file.path, "a") as out:
        out.write('{"step": 2, "loss"')
        out.flush()
        assert not file.refresh()
        out.write(': null}\nnot a record\n{"step": "x"}\n[3]\n')
    assert file.refresh()
    assert plain(file.column("step")) == [1.0, 2.0]
    assert plain(file.column("loss")) == [2.5, None]


@pytest.mark.parametrize("how", ["replaced", "cut"])
def test_metrics_of_a_resumed_run_are_read_anew(how: str, tmp_path: Path) -> None:
    write_metrics(tmp_path, [{"step": n, "loss": float(n)} for n in range(1, 9)])
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.refresh()
    if how == "replaced":
        write_metrics(tmp_path / ".", [], mode="a")
        other = tmp_path / "other"
        other.mkdir()
        write_metrics(other, [{"step": n, "loss": 9.0} for n in range(1, 9)])
        os.replace(other / "metrics.jsonl", file.path)
    else:
        file.path.write_text('{"step": 1, "loss": 9.0}\n')
    assert file.refresh()
    assert set(file.column("loss")) == {9.0}


def test_lists_by_layer_are_used_when_every_record_has_them(tmp_path: Path) -> None:
    records = [{"step": n, "rank_imbalance": 1.5, "layers": {"rank_imbalance": [1.0, 2.0]}} for n in (1, 2)]
    write_metrics(tmp_path, records)
    overview = Run(tmp_path).overview()
    assert overview["heat"]["before"] == [[1.0, 1.0], [2.0, 2.0]]
    assert overview["heat"]["after"] is None
    assert overview["worst"][0]["layer"] == 1
    assert overview["imbalance"]["source"] == "metrics"
    write_metrics(tmp_path, [{"step": 3, "rank_imbalance": 1.5}], mode="a")
    assert Run(tmp_path).overview()["heat"] is None


def history_of(path: Path) -> Any:
    return HistoryReader(open_trace(path)).read()


def test_history_is_the_mean_over_microbatches_and_groups_whatever_the_files(tmp_path: Path) -> None:
    info = TraceInfo(num_layers=3, num_experts=4, num_experts_per_tok=1, ep_size=2, num_groups=2, num_microbatches=3)
    random = np.random.default_rng(0)
    expected: dict[int, list[np.ndarray]] = {}
    for group in range(2):
        for part in (range(1, 4), range(4, 6)):
            with TraceWriter(tmp_path, info, name=f"{group}{part[0]}") as writer:
                for step in part:
                    for microbatch in range(3):
                        load_LPE = random.integers(0, 9, (3, 2, 4))
                        delivered = load_LPE.sum(1).reshape(3, 2, 2)
                        has_matrices = step % 2 == 0
                        writer.write_layers(
                            LayerRows(step, microbatch, group, load_LPE, delivered, has_matrices=has_matrices)
                        )
                        rank_LP = delivered.sum(2)
                        expected.setdefault(step, []).append(rank_LP.max(1) / rank_LP.mean(1))
    history = history_of(tmp_path)
    assert history.steps_S.tolist() == [1, 2, 3, 4, 5]
    assert history.before_SL == pytest.approx(np.array([np.mean(expected[s], 0) for s in expected]), rel=1e-6)
    assert history.worst_before_SL == pytest.approx(np.array([np.max(expected[s], 0) for s in expected]), rel=1e-6)
    assert np.array_equal(history.after_SL, history.before_SL)
    assert (history.rows_SL == 6).all()
    assert history.has_matrices_S.tolist() == [False, True, False, True, False]
    detail = Run(tmp_path).detail(3, layer=0)
    assert (detail["step"], detail["previous"], detail["next"]) in ((2, None, 4), (4, 2, None))


def test_only_new_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, [1, 2])
    seen = Run(tmp_path)
    seen.overview()
    version = seen.version
    seen.refresh()
    assert seen.version == version
    later = make_run(tmp_path / "later", [3])
    for path in (later.path / "trace").iterdir():
        path.rename(tmp_path / "trace" / path.name)
    opened: list[Path] = []
    real = HistoryReader._part
    monkeypatch.setattr(HistoryReader, "_part", lambda self, file: opened.append(file.path) or real(self, file))
    seen.refresh()
    assert seen.version == version + 1
    assert seen.overview()["imbalance"]["step"] == [1, 2, 3]
    assert len(opened) == 1


def test_a_resumed_run_that_cuts_its_trace_is_not_counted_twice(tmp_path: Path) -> None:
    run = make_run(tmp_path, [1, 2, 3])
    seen = Run(tmp_path)
    assert seen.overview()["imbalance"]["step"] == [1, 2, 3]
    prepare_folder(tmp_path / "trace", open_trace(tmp_path).info, resumed_step=1)
    seen.refresh()
    assert seen.overview()["imbalance"]["step"] == [1]
    later = make_run(tmp_path / "later", [2], seed=7)
    for path in (later.path / "trace").iterdir():
        path.rename(tmp_path / "trace" / path.name)
    seen.refresh()
    imbalance = seen.overview()["imbalance"]
    assert imbalance["step"] == [1, 2]
    assert imbalance["before"] == pytest.approx([run.before_SL[0].mean(), later.before_SL[0].mean()], rel=1e-5)


def test_another_run_that_begins_in_the_folder_is_shown_with_its_sizes(tmp_path: Path) -> None:
    make_run(tmp_path, [1])
    seen = Run(tmp_path)
    (name,) = (path.name for path in (tmp_path / "trace").iterdir())
    prepare_folder(tmp_path / "trace", open_trace(tmp_path).info, resumed_step=0)
    info = TraceInfo(num_layers=1, num_experts=4, num_experts_per_tok=1, ep_size=2)
    load_LPE = np.arange(8).reshape(1, 2, 4)
    with TraceWriter(tmp_path / "trace", info, name="0001") as writer:  # the name of the first run's file
        writer.write_layers(LayerRows(1, 0, 0, load_LPE, load_LPE.sum(1).reshape(1, 2, 2)))
    assert [path.name for path in (tmp_path / "trace").iterdir()] == [name]
    seen.refresh()
    assert seen.describe()["info"]["num_layers"] == 1
    assert len(seen.overview()["heat"]["before"]) == 1


def test_a_trace_that_appears_later_is_taken_up(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")  # a run that has just started
    started = Run(tmp_path)
    assert not started.describe()["has_trace"]
    assert started.overview()["imbalance"] is None
    make_run(tmp_path, [1])
    started.refresh()
    assert started.describe()["has_trace"]
    assert started.overview()["imbalance"]["step"] == [1]


def test_a_file_that_goes_bad_meanwhile_is_a_problem_on_the_page_and_the_rest_stays(tmp_path: Path) -> None:
    make_run(tmp_path, [1, 2])
    seen = Run(tmp_path)
    (tmp_path / "trace" / "layers-zz-1.parquet").write_bytes(b"PAR1 but cut")
    seen.refresh()
    assert "layers-zz-1.parquet is not a whole Parquet file" in seen.describe()["problem"]
    assert seen.overview()["imbalance"]["step"] == [1, 2]
    (tmp_path / "trace" / "layers-zz-1.parquet").unlink()
    seen.refresh()
    assert seen.describe()["problem"] == ""


def test_long_runs_are_drawn_in_few_points_whose_means_are_right(tmp_path: Path) -> None:
    write_metrics(tmp_path, [{"step": n, "loss": float(n)} for n in range(1, 2502)])
    curves = Run(tmp_path).overview()["curves"]
    assert curves["per_point"] == 3
    assert len(curves["step"]) == 834
    assert curves["loss"][:2] == [2.0, 5.0]
    assert curves["loss"][-1] == pytest.approx(2500.5)


# What is answered


@pytest.mark.parametrize(("P", "E", "R"), [(1, 3, 0), (2, 6, 1), (3, 12, 2), (8, 64, 3)])
def test_traffic_is_that_of_the_plan_that_training_carries_out(P: int, E: int, R: int) -> None:
    random = np.random.default_rng(P)
    load_PE = random.integers(0, 9, (P, E)) * random.integers(0, 40, E)
    settings = PlannerSettings(num_slots=R)
    placement = plan_loads(torch.from_numpy(load_PE.sum(0))[None], P, settings)[0]
    expected = [complete_plan(placement, torch.from_numpy(load_PE), rank).recv.sum(1) for rank in range(P)]
    slots_PR, quota_PX = placement.slot_expert.numpy().reshape(P, R), placement.quota.numpy().reshape(P, -1)
    assert traffic(load_PE, slots_PR, quota_PX).tolist() == torch.stack(expected, 1).tolist()


def test_a_layer_without_balancing_has_its_traffic_unchanged(tmp_path: Path) -> None:
    off = make_run(tmp_path, [1], balanced=False)
    detail = Run(tmp_path).detail(None, layer=3)
    assert detail["traffic"]["before"] == detail["traffic"]["after"]
    assert detail["replicas"] == []
    assert detail["rank_load"] == off.load_SLPE[0, 3].sum(0).reshape(RANKS, -1).sum(1).tolist()


def test_loads_are_those_of_the_real_tokens_of_each_rank(tmp_path: Path) -> None:
    """C26: 7 tokens of each of 4 ranks, top 2 of 4 experts: 14 rows per rank, 56 in all."""
    info = TraceInfo(num_layers=1, num_experts=4, num_experts_per_tok=2, ep_size=4)
    load_LPE = np.array([[[7, 4, 3, 0], [2, 5, 7, 0], [6, 1, 0, 7], [7, 7, 0, 0]]])
    with TraceWriter(tmp_path, info) as writer:
        writer.write_layers(LayerRows(1, 0, 0, load_LPE, load_LPE.sum(1).reshape(1, 4, 1)))
    detail = Run(tmp_path).detail(None, layer=0)
    assert [sum(row) for row in detail["traffic"]["before"]] == [14] * 4
    assert detail["rank_load"] == [22, 17, 10, 7]
    assert sum(detail["stacks"]["before"]["rows"]) == sum(detail["stacks"]["after"]["rows"]) == 56


def test_steps_without_matrices_still_show_rank_loads(tmp_path: Path) -> None:
    info = TraceInfo(num_layers=1, num_experts=4, num_experts_per_tok=1, ep_size=2)
    load_LPE = np.arange(8).reshape(1, 2, 4)
    with TraceWriter(tmp_path, info) as writer:
        writer.write_layers(LayerRows(4, 0, 0, load_LPE, load_LPE.sum(1).reshape(1, 2, 2), has_matrices=False))
    detail = Run(tmp_path).detail(None, layer=0)
    assert (detail["stacks"], detail["phases"], detail["rank_load"]) == (None, None, [10, 18])


def test_the_nearest_recorded_step_is_shown(run: SampleRun) -> None:
    seen = Run(run.path)
    assert [seen.detail(step, 0)["step"] for step in (None, 0, 4, 6, 7, 99)] == [8, 1, 3, 5, 8, 8]


def test_answers_over_http(run: SampleRun) -> None:
    with client(run.path) as http:
        assert "src=" not in http.get("/").text.partition("<script>")[0]
        assert http.get("/plotly.js").headers["content-type"].startswith("text/javascript")
        assert http.get("/app.js").status_code == 404
        assert http.get("/..%2fserver.py").status_code == 404
        (described,) = http.get("/api/runs").json()["runs"]
        assert (described["name"], described["info"]["num_layers"]) == ("run", LAYERS)
        assert http.get("/api/overview", params={"run": 0}).json()["summary"]["step"] == 8
        assert http.get("/api/detail", params={"layer": 2, "step": 3}).json()["layer"] == 2


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        ("overview?run=7", 400, "there is no run 7"),
        ("overview?run=x", 400, "run is 'x', not a whole number"),
        ("detail?layer=99", 404, "no row of step 8, layer 99"),
        ("detail?layer=1&group=4", 404, "EP group 4"),
        ("everything", 400, "unknown request 'everything'"),
    ],
)
def test_bad_requests_are_answered_in_words(run: SampleRun, request_: str, status: int, message: str) -> None:
    with client(run.path) as http:
        answer = http.get(f"/api/{request_}")
    assert answer.status_code == status
    assert message in answer.json()["error"]


# Whom it answers


@pytest.mark.parametrize("path", ["/", "/plotly.js", "/api/runs", "/api/overview", "/api/nothing"])
def test_without_the_token_nothing_is_answered(run: SampleRun, path: str) -> None:
    with client(run.path, token=TOKEN, host="192.0.2.7") as http:
        for answer in (http.get(path), http.get(path, params={"token": "wrong"}), http.get(path, params={"token": ""})):
            assert answer.status_code == 401
        http.cookies.set(COOKIE, "wrong")
        assert http.get(path).status_code == 401


def test_the_token_leaves_the_address_for_a_cookie(run: SampleRun) -> None:
    with client(run.path, token=TOKEN, host="192.0.2.7") as http:
        answer = http.get("/", params={"token": TOKEN})
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert "httponly" in answer.headers["set-cookie"].lower()
        assert "samesite=strict" in answer.headers["set-cookie"].lower()
        assert http.get("/api/runs").status_code == 200


def test_on_localhost_other_host_names_are_refused(run: SampleRun) -> None:
    for host, status in (("localhost", 200), ("127.0.0.1", 200), ("[::1]", 200), ("evil.example", 421)):
        with client(run.path, host=host) as http:
            assert http.get("/api/runs").status_code == status, host


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *[(host, True) for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]")],
        *[(host, False) for host in ("0.0.0.0", "::", "10.1.2.3", "localhost.evil.example", "")],
    ],
)
def test_what_counts_as_this_machine(host: str, local: bool) -> None:
    assert is_local(host) is local


# The command


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, ["view", *map(str, arguments)], prog_name="equipoise")


def bad_files(folder: Path, run: SampleRun) -> dict[str, Path]:
    """Folders with one file each that is not what it should be."""
    good = next((run.path / "trace").iterdir()).read_bytes()
    table = pq.read_table(next((run.path / "trace").iterdir()))
    made = {name: folder / name for name in ("empty", "cut", "foreign", "version", "columns", "nothing")}
    for path in made.values():
        path.mkdir()
    (made["empty"] / "layers-1.parquet").write_bytes(b"")
    (made["cut"] / "layers-1.parquet").write_bytes(good[: len(good) // 2])
    pq.write_table(table.replace_schema_metadata(None), made["foreign"] / "layers-1.parquet")
    metadata = dict(table.schema.metadata)
    content = json.loads(metadata[b"equipoise"])
    newer = {b"equipoise": json.dumps(content | {"version": 99}).encode()}
    pq.write_table(table.replace_schema_metadata(newer), made["version"] / "layers-1.parquet")
    pq.write_table(
        table.drop_columns(["rank_load"]).replace_schema_metadata(metadata), made["columns"] / "layers-1.parquet"
    )
    return made


def test_bad_input_is_a_message_and_not_a_traceback(tmp_path: Path, run: SampleRun) -> None:
    made = bad_files(tmp_path, run)
    words = {
        "empty": "is empty: 0 bytes",
        "cut": "is not a whole Parquet file",
        "foreign": "but not of a load trace",
        "version": "has version 99",
        "columns": "lacks columns of the table 'layers': rank_load",
        "nothing": "there is no file of a load trace",
        "absent": "there is no such file or folder",
    }
    for name, message in words.items():
        result = invoke(made.get(name, tmp_path / name))
        assert result.exit_code == 1, name
        assert isinstance(result.exception, SystemExit), name
        assert message in result.stderr, name
        assert str(tmp_path / name) in result.stderr, name


def test_other_wrong_commands_are_refused_before_anything_is_served(tmp_path: Path, run: SampleRun) -> None:
    assert "Missing argument 'RUN...'" in invoke().stderr
    assert "--token has 5 characters" in invoke(run.path, "--token", "short").stderr
    assert "is not an address" in invoke(run.path, "--host", "no.such.host.invalid").stderr
    with open_socket("localhost", 0) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen on localhost port {port}" in invoke(run.path, "--port", port).stderr
    done = invoke(run.path, "--export", tmp_path / "new" / "run.html")
    assert (done.exit_code, done.stdout.startswith("wrote ")) == (0, True)
    (tmp_path / "there.html").write_text("mine")
    assert "there already" in invoke(run.path, "--export", tmp_path / "there.html").stderr
    assert (tmp_path / "there.html").read_text() == "mine"
    assert "cannot write" in invoke(run.path, "--export", tmp_path / "there.html" / "x.html").stderr


def test_a_missing_package_is_named(run: SampleRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    with pytest.raises(ConfigError, match=r"starlette.*pip install 'equipoise\[view\]'"):
        make_app(Runs([run.path]), None)


def test_a_folder_of_runs_stands_for_all_of_them_and_equal_names_are_told_apart(tmp_path: Path) -> None:
    for name in ("b", "a"):
        make_run(tmp_path / "runs" / name, [1])
    (tmp_path / "runs" / "notes").mkdir()
    make_run(tmp_path / "other" / "a", [1])
    runs = Runs([tmp_path / "runs", tmp_path / "other" / "a"])
    assert [run.name for run in runs.runs] == ["a", "b", "a (2)"]
    with pytest.raises(TraceError, match="no such file or folder"):
        Runs([tmp_path / "absent"])


def test_a_token_is_made_where_the_address_is_not_local(run: SampleRun) -> None:
    command = [sys.executable, "-m", "equipoise", "view", str(run.path), "--host", "0.0.0.0", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = next(line for line in iter(process.stdout.readline, "") if line.startswith("http"))
        assert len(address.strip().partition("?token=")[2]) >= 32
        port = int(address.split(":")[2].split("/")[0])
        with _connected(port) as connection:
            connection.sendall(b"GET /api/runs HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert connection.recv(64).split()[1] == b"401"
    finally:
        process.terminate()
        assert process.wait(60) in (0, -15)


def _connected(port: int) -> socket.socket:
    """A connection, as soon as the server takes one."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=20)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
