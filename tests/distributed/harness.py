"""Runs a function on several ranks, each a fresh interpreter, under a deadline.

`run_ranks(fn, world_size, *args)` returns what each rank returned, or fails with every rank's traceback and
output. `observe_ranks` is the same without the judgement, for tests in which ranks are meant to die.
Each rank gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (a free port), and
one thread. `fn` is a top-level function of an importable module or of a test file. At the deadline every rank
writes the stacks of its threads, then all are killed; no process outlives the call.
"""

import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
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
        ranks: list[subprocess.Popen[bytes]] = []
        ended: dict[int, float] = {}
        start = time.monotonic()
        try:
            for rank in range(world_size):
                with open(job / f"output{rank}", "wb") as output:
                    process = subprocess.Popen(
                        [sys.executable, __file__, str(job), str(rank)],
                        env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
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


def _stop(ranks: list[subprocess.Popen[bytes]]) -> list[int | None]:
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


if __name__ == "__main__":
    sys.exit(_rank_main(Path(sys.argv[1]), int(sys.argv[2])))
