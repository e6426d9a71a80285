"""Starting the worker processes of this machine through torch's elastic agent, and being such a worker.

The agent places the workers (RANK, WORLD_SIZE, ...), passes SIGINT and SIGTERM on to them and ends them all
when one fails. This module adds what a user meets: one short error instead of the agent's report, and
workers that stop by themselves when the launching process is gone.
"""

import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.errors import ConfigError, RankFailure

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

GRACE_S = 60
"""Seconds that workers get to save after a signal before they are killed."""
WORKER_PROGRAM = (sys.executable, "-m", "equipoise")
_RUN_ID_PREFIX = "equipoise-"
_LOCALHOST = "127.0.0.1"
_STOPPED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a worker that was told to end, by the agent as a rule."""
_AGENT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


STOP_NOTICE = (
    "Stopping: what is under way is finished (training saves its state). Ctrl-C again ends at once, without that."
)


class LaunchError(RankFailure):
    """A worker process failed. `exit_code` is what the command should exit with."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LaunchStopped(BaseException):
    """The run was stopped by a signal; the workers had `GRACE_S` to save and are gone.

    Not an `Exception`, so that no handler of errors takes a wanted stop for a failure.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


def tell_of_stop() -> None:
    """Says what a first Ctrl-C does; from a signal's handler, so past Python's buffers."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{STOP_NOTICE}\n".encode())


def has_launcher(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has given this process its place: RANK and WORLD_SIZE are set."""
    return bool(environment.get("RANK")) and bool(environment.get("WORLD_SIZE"))


def launched_world_size(environment: Mapping[str, str]) -> int:
    """WORLD_SIZE as the launcher gave it; raises `ConfigError` where it is no number of processes."""
    text = environment["WORLD_SIZE"]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE={text!r}: expected the number of processes that the launcher starts, from 1")
    return int(text)


def is_own_worker(environment: Mapping[str, str]) -> bool:
    """Whether this process is a worker that `launch` started."""
    return environment.get("TORCHELASTIC_RUN_ID", "").startswith(_RUN_ID_PREFIX)


def is_launcher_gone(environment: Mapping[str, str]) -> bool:
    """In a worker that `launch` started, whether the launching process has ended already: another one has adopted this.
    The run's id has its process id."""
    pid = environment["TORCHELASTIC_RUN_ID"].removeprefix(_RUN_ID_PREFIX).partition("-")[0]
    if not pid.isdecimal() or os.getppid() == int(pid):
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:  # there is one, of another user
        return False
    return False


def default_worker_count() -> int:
    """Workers of this machine when the user names no number: one per accelerator device, one on CPU."""
    from equipoise.accelerator import get_accelerator

    accelerator = get_accelerator()
    return 1 if accelerator.device_type == "cpu" else max(1, accelerator.device_count())


def check_worker_count(count: int) -> None:
    """Raise `ConfigError` when there are fewer accelerator devices than workers."""
    from equipoise.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_type == "cpu":
        return
    devices = accelerator.device_count()
    if count > devices:
        raise ConfigError(
            f"--nproc-per-node {count}: this machine shows {devices} {accelerator.name} device(s), and each "
            f"worker needs its own; give 1 to {devices}, or set EQUIPOISE_ACCELERATOR=cpu to run on the CPU"
        )


def core_count() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port() -> int:
    """A TCP port of localhost that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((_LOCALHOST, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the time of the block, then put the old values back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def world_of_one() -> contextlib.AbstractContextManager[None]:
    """For the time of the block, the environment that a launcher would give a single worker."""
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return environment({**one, "MASTER_ADDR": _LOCALHOST, "MASTER_PORT": str(free_port())})


def choose_worker_count(asked: int | None) -> tuple[int, int]:
    """Workers to start here (1 where a launcher started this process), and the world size that follows.

    Raises:
        ConfigError: this machine cannot start so many.
    """
    if has_launcher(os.environ):
        return asked or 1, launched_world_size(os.environ)
    count = asked or default_worker_count()
    check_worker_count(count)
    return count, count


def start(count: int, arguments: Sequence[str], run: Callable[[], None]) -> None:
    """Calls `run` here where this process is a worker, or the only one; else starts `count` workers of the command
    `equipoise *arguments` and waits for them. Raises as `launch` does."""
    if has_launcher(os.environ):
        if is_own_worker(os.environ):
            end_with_parent()
        run()
    elif count == 1:
        with world_of_one():
            run()
    else:
        launch(count, [*WORKER_PROGRAM, *arguments])


def launch(count: int, command: Sequence[str]) -> None:
    """Run `count` workers of `command` on this machine and wait for all of them; no restarts.

    Each worker gets cores / `count` OpenMP threads unless OMP_NUM_THREADS is set. When a worker fails, the
    others are ended. No worker is left when this returns or raises. Call it from the main thread.

    Args:
        command: the program, then its arguments, the same for every worker.

    Raises:
        LaunchError: a worker failed; names the rank, its exit code or signal, and its message.
        LaunchStopped: this process was told to stop; the workers received the same signal and got `GRACE_S`
            seconds (30 under torch 2.11, where the agent has no such setting). Or a worker was, and all saved.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logs = tempfile.mkdtemp(prefix="equipoise-launch-")
    settings: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": count,
        "run_id": f"{_RUN_ID_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",  # port 0: the agent's store takes a free one, without a race
        "local_addr": _LOCALHOST,
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "logs_specs": DefaultLogsSpecs(log_dir=logs),
    }
    newer = {"signals_to_handle": ",".join(_signals_to_handle()), "shutdown_timeout": GRACE_S}
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    settings |= {name: value for name, value in newer.items() if name in known}
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, core_count() // count))
    try:
        with environment({"OMP_NUM_THREADS": threads}), _quiet_agent(), _handlers_put_back(), _second_interrupt_kills():
            elastic_launch(LaunchConfig(**settings), command[0])(*command[1:])
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        if codes <= {128 + signal.SIGTERM, 128 + signal.SIGINT}:  # the signal was sent to a worker itself
            raise LaunchStopped(min(codes) - 128) from None
        raise describe_failures(error.failures, count) from None
    except SignalException as stop:
        raise LaunchStopped(int(stop.sigval)) from None
    finally:
        shutil.rmtree(logs, ignore_errors=True)


def _signals_to_handle() -> list[str]:
    """Signals that end the run; those that are ignored (SIGHUP under nohup) stay ignored."""
    present = [name for name in _AGENT_SIGNALS if hasattr(signal, name)]
    return [name for name in present if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN]


@contextlib.contextmanager
def _handlers_put_back() -> Iterator[None]:
    """Undo the signal handlers that the agent installs for good."""
    numbers = [getattr(signal, name) for name in _signals_to_handle()]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def _second_interrupt_kills() -> Iterator[None]:
    """Tells what a first Ctrl-C does, and kills the workers at a second: the agent would only ask them again."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)  # told of signals whoever handles them

    def watch() -> None:
        interrupts = 0
        while numbers := os.read(read, 64):
            for _ in range(numbers.count(signal.SIGINT)):
                interrupts += 1
                if interrupts == 1:
                    tell_of_stop()
                else:
                    for pid in _children():
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)

    watcher = threading.Thread(target=watch, name="second-interrupt", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)
        watcher.join()
        os.close(read)


def _children() -> list[int]:
    """Processes that this one has started; none where there is no /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keep the agent's log lines from the user, who gets one error instead; LOGLEVEL brings them back."""
    before = logging.root.manager.disable
    if not os.environ.get("LOGLEVEL"):
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def describe_failures(failures: "Mapping[int, ProcessFailure]", count: int) -> LaunchError:
    """One short error about the failure that caused the others.

    That is the first by time, except that a worker killed from outside counts before workers that failed
    because of it, and workers that the agent ended count last.
    """

    def order(rank: int) -> tuple[bool, bool, int, int]:
        failure = failures[rank]
        return failure.exitcode in _STOPPED, failure.exitcode >= 0, failure.timestamp, rank

    first, *others = sorted(failures, key=order)
    failure = failures[first]
    text = f"rank {first} of {count} {_how_it_ended(failure.exitcode)}"
    message = _recorded_message(failure.error_file_data)
    text += f":\n{message}" if message else "; its own output is above"
    if not message:  # killed from outside: another rank may have named what it waited for
        reports = {r: _recorded_message(failures[r].error_file_data) for r in others}
        reporter = next((r for r in others if reports[r]), None)
        if reporter is not None:
            text += f"\nrank {reporter} reported:\n{reports[reporter]}"
    also = [f"rank {r} {_how_it_ended(failures[r].exitcode)}" for r in sorted(others)]
    if also:
        text += f"\n({'; '.join(also[:4])}{'; ...' if len(also) > 4 else ''})"
    return LaunchError(text, 2 if failure.exitcode == 2 else 1)


def _how_it_ended(exit_code: int) -> str:
    if exit_code in _STOPPED:
        return "was stopped"
    if exit_code >= 0:
        return f"failed with exit code {exit_code}"
    name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else f"signal {-exit_code}"
    hint = " (often the system's out-of-memory killer)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _recorded_message(data: Mapping[str, Any]) -> str:
    message = data.get("message")
    return str(message.get("message", "")).strip() if isinstance(message, Mapping) else ""


def record_error(error: BaseException) -> bool:
    """In a worker, leave `error` where the agent looks for it; returns whether there is such a place.

    Call it while `error` is being handled.
    """
    if not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        return False
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        get_error_handler().record_exception(error)
    except OSError as problem:
        print(f"The error could not be recorded for the launcher: {problem}", file=sys.stderr)
        return False
    return True


def end_with_parent(grace_s: float = GRACE_S, interval_s: float = 1.0) -> None:
    """In a worker, watch the launching process: when it is gone, ask this one to stop, then end it.

    The agent cannot end its workers when it is killed itself. Workers without it would wait for ever. Where it went
    while this process was being started, this ends at once.
    """
    if is_launcher_gone(os.environ):
        print("The process that launched this worker is gone; it ends as well.", file=sys.stderr)
        raise SystemExit(128 + signal.SIGTERM)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(interval_s)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
