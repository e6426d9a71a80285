"""The benchmark of loss curves: what is left of runs that are ended, what is drawn of curves of different lengths."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "loss_curves.py"
RUN = """
import json, subprocess, sys, time
from pathlib import Path
folder, steps, hangs = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "hangs"
rank = subprocess.Popen(["sleep", "100"], start_new_session=True) if hangs else None
(folder / "run").mkdir()
(folder / "pid").write_text(str(rank.pid if rank else 0))
with (folder / "run" / "metrics.jsonl").open("w") as file:
    for step in range(steps):
        file.write(json.dumps({"step": step + 1, "loss": 5.0 - step}) + "\\n")
    file.write('{"step": 9, "lo')
time.sleep(100 if hangs else 0)
"""
"""A run of which a rank is in a session of its own, as torch's agent starts them."""


@pytest.fixture
def curves() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loss_curves", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def begin(folder: Path, steps: int, how: str = "ends") -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "errors").write_text("what it said")
    return subprocess.Popen([sys.executable, "-c", RUN, str(folder), str(steps), how], start_new_session=True)


def is_running(pid: int) -> bool:
    """An orphan that has ended is no process any more, or waits for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(path: Path) -> int:
    deadline = time.monotonic() + 20
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(path.read_text())


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="descendants are found in /proc")
def test_ranks_end_with_a_run_at_its_limit(curves: ModuleType, tmp_path: Path) -> None:
    process = begin(tmp_path, 3, "hangs")
    rank = wait_for(tmp_path / "pid")
    records = curves.step_records(process, tmp_path, 1.0)
    assert [record["loss"] for record in records] == [5, 4, 3]
    assert is_gone(rank)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="descendants are found in /proc")
def test_ranks_end_with_a_benchmark_that_is_told_to(tmp_path: Path) -> None:
    """Of the real one, whose runs this stands for."""
    call = f"""
import importlib.util, subprocess, sys
spec = importlib.util.spec_from_file_location("loss_curves", {str(SCRIPT)!r})
curves = importlib.util.module_from_spec(spec)
spec.loader.exec_module(curves)
def start(*given):
    return subprocess.Popen([sys.executable, "-c", {RUN!r}, {str(tmp_path)!r}, "3", "hangs"], start_new_session=True)
curves.start = start
sys.argv = ["loss_curves.py", "demo", "--out", {str(tmp_path / "out.json")!r}]
curves.main()
"""
    benchmark = subprocess.Popen([sys.executable, "-c", call])
    rank = wait_for(tmp_path / "pid")
    benchmark.terminate()
    assert benchmark.wait(20) == 128 + signal.SIGTERM
    assert is_gone(rank)


def test_a_run_that_somebody_else_killed_has_failed(curves: ModuleType, tmp_path: Path) -> None:
    process = begin(tmp_path, 3, "hangs")
    rank = wait_for(tmp_path / "pid")
    process.kill()
    with pytest.raises(SystemExit, match="what it said"):
        curves.step_records(process, tmp_path, 20.0)
    os.kill(rank, signal.SIGKILL)


def test_curves_show_the_steps_that_both_have(
    curves: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shorter curve stretched over the whole width would lie beside the other one."""

    def start(recipe: str, ranks: int, steps: int, mode: str, slots: int, more: list[str], folder: Path) -> Any:
        return begin(folder, 4 if mode == "off" else 3)

    monkeypatch.setattr(curves, "start", start)
    monkeypatch.setattr(sys, "argv", ["loss_curves.py", "demo", "--out", str(tmp_path / "out.json")])
    before = signal.getsignal(signal.SIGTERM)
    try:
        curves.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["summary"] == {"steps": 3, "largest_difference": 0, "first_step_apart": None, "both_fall": True}
    assert len(content["rows"]) == 7
    lines = (tmp_path / "out.svg").read_text().split('points="')[1:]
    assert len({line.split('"')[0] for line in lines}) == 1
