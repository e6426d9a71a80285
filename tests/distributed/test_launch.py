"""Starting workers: their environment, one short error when one fails, signals, and no process left over."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import equipoise
from equipoise.launch import GRACE_S, STOP_NOTICE, LaunchError, free_port, launch

TOY_PROGRAM = Path(__file__).parents[1] / "unit" / "toy_program.py"
SOURCES = str(Path(equipoise.__file__).parents[1])
DEADLINE_S = 60


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.05)


class Run:
    """`equipoise train` over the toy loop, in a process of its own."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.out = folder / "out"
        command = [sys.executable, str(TOY_PROGRAM), "train", "--out", str(self.out), *arguments]
        clean = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {
            "PYTHONPATH": SOURCES,
            "TMPDIR": str(folder),
        }
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=clean | environment,
            # A shell's background job ignores SIGINT, and so would everything that is started from it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def wait(self) -> tuple[int, str]:
        """Exit code and standard error."""
        stderr = self.process.communicate(timeout=DEADLINE_S)[1]
        return self.process.returncode, stderr

    def traces(self) -> dict[int, dict[str, str]]:
        """What each rank left in the run folder so far."""
        files = sorted(self.out.glob("rank-[0-9]"))
        return {int(f.name[5:]): dict(line.split("=", 1) for line in f.read_text().splitlines()) for f in files}

    def pids(self) -> list[int]:
        return [int(trace["pid"]) for trace in self.traces().values()]

    def started(self, count: int) -> None:
        until(lambda: len(self.traces()) == count or self.process.poll() is not None, f"{count} ranks started")
        assert len(self.traces()) == count, self.wait()

    def end(self) -> None:
        for pid in [self.process.pid, *self.pids()]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=DEADLINE_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*arguments: str, **environment: str) -> Run:
        runs.append(Run(tmp_path, *arguments, **environment))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


def test_workers_get_a_place_a_share_of_the_cores_and_the_same_arguments(start: Callable[..., Run]) -> None:
    run = start("--nproc-per-node", "2", "--train.steps", "3", "--no-resume")
    assert run.wait() == (0, "")
    traces = run.traces()
    assert {(t["RANK"], t["LOCAL_RANK"], t["WORLD_SIZE"], t["LOCAL_WORLD_SIZE"]) for t in traces.values()} == {
        ("0", "0", "2", "2"),
        ("1", "1", "2", "2"),
    }
    assert {t["MASTER_ADDR"] for t in traces.values()} == {"127.0.0.1"}
    assert len({t["MASTER_PORT"] for t in traces.values()}) == 1
    assert {t["OMP_NUM_THREADS"] for t in traces.values()} == {str(max(1, len(os.sched_getaffinity(0)) // 2))}
    assert {(t["steps"], t["resume"]) for t in traces.values()} == {("3", "False")}
    assert "--nproc-per-node 2" in traces[0]["argv"]


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        ("fail", "rank 1 of 2 failed with exit code 1:\nEquipoiseError: the loss of rank 1 is odd"),
        ("crash", "rank 1 of 2 failed with exit code 1:\nKeyError: 'a mistake in the program'"),
        ("killed", "rank 1 of 2 was killed by SIGKILL"),
    ],
)
def test_a_failing_worker_becomes_one_short_error_and_ends_the_others(
    start: Callable[..., Run], behaviour: str, expected: str
) -> None:
    run = start("--nproc-per-node", "2", "--train.behaviour", behaviour, "--train.acting-rank", "1")
    code, stderr = run.wait()
    assert code == 1
    assert stderr.count("Error: rank") == 1
    assert expected in stderr
    assert "(rank 0 was stopped)" in stderr
    assert ("Traceback" in stderr) == (behaviour == "crash")
    assert len(run.pids()) == 2
    assert not any(alive(pid) for pid in run.pids())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_worker_which_saves_before_the_end(
    start: Callable[..., Run], number: signal.Signals
) -> None:
    run = start("--nproc-per-node", "2", "--train.behaviour", "wait")
    run.started(2)
    run.process.send_signal(number)
    code, stderr = run.wait()
    assert code == 128 + number
    assert "Traceback" not in stderr
    assert (STOP_NOTICE in stderr) == (number == signal.SIGINT)
    assert [(run.out / f"saved-{rank}").read_text() for rank in (0, 1)] == [number.name] * 2
    assert not any(alive(pid) for pid in run.pids())


def test_a_signal_to_one_worker_alone_is_a_stop_and_no_failure(start: Callable[..., Run]) -> None:
    run = start("--nproc-per-node", "2", "--train.behaviour", "wait")
    run.started(2)
    os.kill(run.pids()[1], signal.SIGTERM)
    assert run.wait() == (128 + signal.SIGTERM, "")
    assert (run.out / "saved-1").exists()


def test_a_worker_that_heeds_no_signal_is_killed_after_the_grace_period(start: Callable[..., Run]) -> None:
    run = start("--nproc-per-node", "2", "--train.behaviour", "stubborn", TOY_GRACE_S="1")
    run.started(2)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait()[0] == 128 + signal.SIGTERM
    assert not any(alive(pid) for pid in run.pids())


def test_a_second_interrupt_ends_workers_at_once(start: Callable[..., Run]) -> None:
    run = start("--nproc-per-node", "2", "--train.behaviour", "stubborn")
    run.started(2)
    run.process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert run.process.poll() is None, "a first one lets them save"
    started = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    code, stderr = run.wait()
    assert code == 128 + signal.SIGINT
    assert time.monotonic() - started < GRACE_S / 4
    assert stderr.count(STOP_NOTICE) == 1
    assert "Traceback" not in stderr
    assert not any(alive(pid) for pid in run.pids())


def test_workers_end_when_the_launching_process_is_killed(start: Callable[..., Run]) -> None:
    run = start("--nproc-per-node", "2", "--train.behaviour", "wait")
    run.started(2)
    run.process.kill()
    until(lambda: not any(alive(pid) for pid in run.pids()), "the workers ended")
    assert (run.out / "saved-0").read_text() == "SIGTERM"


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_worker_whose_launching_process_went_while_it_started_does_not_wait_for_the_others(is_gone: bool) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    pid = ended.pid if is_gone else os.getpid()
    code = "from equipoise import launch; launch.start(2, [], lambda: print('runs'))"
    variables = {"PYTHONPATH": SOURCES, "RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": f"equipoise-{pid}-0a"}
    worker = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True, timeout=DEADLINE_S
    )
    told = "The process that launched this worker is gone"
    assert (worker.returncode, worker.stdout, told in worker.stderr) == (
        (143, "", True) if is_gone else (0, "runs\n", False)
    )


def test_one_process_runs_in_place_and_stops_by_signal_after_saving(start: Callable[..., Run]) -> None:
    run = start("--nproc-per-node", "1", "--train.behaviour", "wait")
    run.started(1)
    assert run.pids() == [run.process.pid]
    assert run.traces()[0]["WORLD_SIZE"] == "1"
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == (128 + signal.SIGTERM, "")
    assert (run.out / "saved-0").read_text() == "SIGTERM"


def test_under_a_launcher_it_joins_and_starts_nothing(start: Callable[..., Run]) -> None:
    place = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    run = start("--nproc-per-node", "2", **place)
    assert run.wait() == (0, "")
    assert run.pids() == [run.process.pid]
    assert run.traces()[1]["MASTER_PORT"] == "1"


def test_any_command_can_be_launched_and_its_exit_code_is_reported() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    program = "import os, sys; sys.exit(3 if os.environ['RANK'] == '1' else 0)"
    with pytest.raises(LaunchError, match="rank 1 of 2 failed with exit code 3; its own output is above") as caught:
        launch(2, [sys.executable, "-c", program])
    assert caught.value.exit_code == 1
    assert {number: signal.getsignal(number) for number in before} == before
    assert "RANK" not in os.environ


def test_free_ports_can_be_bound() -> None:
    with socket.socket() as bound:
        port = free_port()
        bound.bind(("127.0.0.1", port))
        assert bound.getsockname()[1] == port
