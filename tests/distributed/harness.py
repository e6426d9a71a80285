"""Runs a function on several ranks, each a process of its own, under a deadline.

`run_ranks(fn, world_size, *args)` returns what each rank returned, or fails with every rank's traceback and
output. `observe_ranks` is the same without the judgement, for tests in which ranks are meant to die.
Each rank gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (a free port), and
one thread. `fn` is a top-level function of an importable module or of a test file. At the deadline every rank
writes the stacks of its threads, then all are killed; no process outlives the call.

Ranks are forked from one nursery, a process that has imported torch and most of ours and has started no thread:
importing that takes longer than most tests. Nothing of ours does more when it is imported than define.
"""

import atexit
import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUTPUT_TAIL = 6000  # characters of each rank's output that a failure shows
PRELOADED = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch._dynamo",  # which the meta device imports
    "pytest",
    "equipoise.train.run",
    "equipoise.serve.engine",
    "distributed.balance_rig",
    "distributed.rig",
)
STACKS_S = 1.0  # time that a rank is given to write its stacks before it is killed


class RanksFailed(AssertionError):  # noqa: N818 - reads as a sentence in a test's report
    """A rank raised, died or passed the deadline; the message holds every rank's traceback and output."""


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended. `exit_code`: negative for a signal; None: killed by the harness while running."""

    rank: int
    exit_code: int | None
    value: Any  # what the function returned, None unless `returned`
    returned: bool
    traceback: str  # of the exception that left the function, or empty
    output: str  # stdout and stderr together, with the stacks if it was killed here
    seconds: float  # from the start of the ranks until this one ended

    @property
    def ok(self) -> bool:
        """The function returned and the interpreter ended normally."""
        return self.returned and self.exit_code == 0


def free_port() -> int:
    """A TCP port of localhost that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    deadline_s: float = 60,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls `fn(*args)` on every rank and returns the results by rank.

    Arguments and results are pickled. Once a rank has failed the others get 5 s to end. Raises RanksFailed.
    """
    outcomes = observe_ranks(fn, world_size, *args, deadline_s=deadline_s, env=env, after_failure_s=5)
    if all(o.ok for o in outcomes):
        return [o.value for o in outcomes]
    raise RanksFailed(f"{fn.__qualname__} on {world_size} ranks\n" + "\n".join(map(_describe, outcomes)))


def observe_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    deadline_s: float = 60,
    env: Mapping[str, str] | None = None,
    after_failure_s: float | None = None,
    wait_for: Collection[int] | None = None,
) -> list[RankOutcome]:
    """Calls `fn(*args)` on every rank and tells how each ended, whatever happened.

    Returns when the ranks `wait_for` (default: all) have ended, at the deadline, or `after_failure_s` seconds
    after the first rank that failed (default: no such limit). Ranks that still run are killed.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        job = Path(name)
        source = inspect.getfile(fn)
        call = (fn.__module__, source, fn.__qualname__, pickle.dumps(args))
        (job / "call").write_bytes(pickle.dumps(call))
        base = {**os.environ, **_environment(world_size), **(env or {})}
        ranks: list[_Forked] = []
        ended: dict[int, float] = {}
        start = time.monotonic()
        try:
            for rank in range(world_size):
                variables = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = _nursery().fork(job, rank, variables)
                ranks.append(process)
            needed = set(range(world_size) if wait_for is None else wait_for)
            limit = start + deadline_s
            while not needed <= ended.keys() and time.monotonic() < limit:
                time.sleep(0.02)
                for rank, process in enumerate(ranks):
                    if rank not in ended and process.poll() is not None:
                        ended[rank] = time.monotonic() - start
                        if process.returncode != 0 and after_failure_s is not None:
                            limit = min(limit, time.monotonic() + after_failure_s)
        finally:
            codes = _stop(ranks)
        total = time.monotonic() - start
        return [_outcome(job, rank, codes[rank], ended.get(rank, total)) for rank in range(world_size)]


class _Nursery:
    """The process that ranks are forked from: one line of JSON asks, one answers."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "nursery"],
            env={**os.environ, **_environment(1)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self.process.kill)
        self._lock = threading.Lock()

    def ask(self, **question: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with self._lock:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())

    def fork(self, job: Path, rank: int, variables: Mapping[str, str]) -> "_Forked":
        return _Forked(self, self.ask(job=str(job), rank=rank, variables=dict(variables), path=sys.path))


class _Forked:
    """A rank, with the part of Popen's interface that is used here."""

    def __init__(self, nursery: _Nursery, pid: int) -> None:
        self.nursery, self.pid = nursery, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.nursery.ask(poll=self.pid)
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


_nurseries: list[_Nursery] = []


def _nursery() -> _Nursery:
    if not _nurseries or _nurseries[0].process.poll() is not None:
        _nurseries[:] = [_Nursery()]
    return _nurseries[0]


def _environment(world_size: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }


def _stop(ranks: "list[_Forked]") -> list[int | None]:
    """Kills what still runs, with its descendants, once its stacks are written. Exit codes; None: killed."""
    codes = [process.poll() for process in ranks]
    running = [process for process, code in zip(ranks, codes) if code is None]
    for process in running:
        process.send_signal(signal.SIGUSR1)  # faulthandler writes the stacks
    if running:
        time.sleep(STACKS_S)
    for process in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # also what an ended rank has left behind
        process.wait()
    return codes


def _outcome(job: Path, rank: int, code: int | None, seconds: float) -> RankOutcome:
    output = (job / f"output{rank}").read_text(errors="replace")
    result = job / f"result{rank}"
    returned, value, trace = False, None, ""
    if result.exists():
        returned, payload = pickle.loads(result.read_bytes())
        value, trace = (pickle.loads(payload), "") if returned else (None, payload)
    return RankOutcome(rank, code, value, returned, trace, output, seconds)


def _describe(outcome: RankOutcome) -> str:
    killed = outcome.exit_code is None
    end = "did not end in time and was killed" if killed else f"exit code {outcome.exit_code}"
    lines = [f"---- rank {outcome.rank}: {end} after {outcome.seconds:.1f} s"]
    if outcome.traceback:
        lines.append(outcome.traceback.rstrip())
    if outcome.output:
        lines += [f"---- rank {outcome.rank}, output", outcome.output[-OUTPUT_TAIL:].rstrip()]
    return "\n".join(lines)


def _load(module_name: str, source: str) -> Any:
    """The module by name or, for a test file known to the parent under a name of its own, from its source."""
    with contextlib.suppress(ImportError):
        module = importlib.import_module(module_name)
        if getattr(module, "__file__", None) == source:
            return module
    sys.path.insert(0, str(Path(source).parent))
    spec = importlib.util.spec_from_file_location(module_name, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpid(), signal.SIGKILL)


def _rank_main(job: Path, rank: int) -> int:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    returned, payload = False, b""
    try:
        module_name, source, qualname, args = pickle.loads((job / "call").read_bytes())
        target = _load(module_name, source)
        for part in qualname.split("."):
            target = getattr(target, part)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        returned, payload = True, pickle.dumps(target(*pickle.loads(args)))
    except SystemExit as e:
        (job / f"result{rank}").write_bytes(pickle.dumps((False, traceback.format_exc())))
        raise e
    except BaseException:
        payload = traceback.format_exc()
    (job / f"result{rank}").write_bytes(pickle.dumps((returned, payload)))
    return 0 if returned else 1


def _nursery_main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    if os.environ.get("TRITON_INTERPRET") == "1":
        importlib.import_module("triton_interpreter").quicken()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anybody prints must not be taken for an answer
    questions = iter(sys.stdin.readline, "")
    for line in questions:
        question = json.loads(line)
        if "poll" in question:
            pid, status = os.waitpid(question["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                _become_rank(question)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _become_rank(question: dict[str, Any]) -> None:
    """In the forked process: what a fresh interpreter would have, then the rank; does not return."""
    os.setsid()
    job, rank = Path(question["job"]), question["rank"]
    output = os.open(job / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 256)  # the nursery's pipes
    os.environ.clear()
    os.environ.update(question["variables"])
    sys.path[:] = question["path"]
    code = 1
    try:
        code = _rank_main(job, rank)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _nursery_main()
