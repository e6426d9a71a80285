"""Watches this rank's operations: names the missing ranks when a collective fails, ends a process that hangs.

Two daemon threads. The *beat* publishes this rank's `Status` over a store connection of its own, at once when
the operation changes (at a bounded rate) and slowly otherwise. The *watchdog* does no input or output until
an operation has outlasted its deadline: backends do not always keep their own timeouts.
"""

import contextlib
import faulthandler
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch import distributed as dist

from equipoise.distributed.status import Board, Status, advance, explain, investigate, shorten_ranks
from equipoise.errors import RankFailure

WATCHDOG_EXIT_CODE = 75
PUBLICATIONS_PER_S = 2000  # of all ranks together: what the store's one thread serves without effort
FOUND_S = 5.0  # from a check's finding to the end of the process, if it does not raise by itself
STORE_S = 10.0  # allowed for the store to answer
ERROR_CHARACTERS = 2000
ASK_EACH = 128  # members of a group in which each rank looks up the others by itself

_COMMUNICATION = re.compile(
    r"gloo|[nmrhx]ccl|process ?group|TCPStore|FileStore|connection (closed|reset|refused)|broken pipe|"
    r"^wait timeout|^timeout waiting for key",
    re.IGNORECASE,
)


def is_communication_error(error: BaseException) -> bool:
    """Whether an exception comes from a communication backend or the store; Gloo's are bare RuntimeErrors."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and _COMMUNICATION.search(str(error)) is not None


@dataclass(frozen=True)
class _Operation:
    path: str
    group: dist.ProcessGroup | None
    deadline_s: float
    stated: bool  # the deadline was given for this operation or one around it


class Watch:
    """Publishes what this rank does and acts when that fails or takes too long. One per World.

    `board` lies on a store connection of its own; `store_host` describes the store's server for messages.
    `deadline_s` is the longest that an operation may go without progress unless it states its own.
    `before_exit` runs, bounded, before the watchdog ends the process. Operations are those of the thread that
    made the Watch; in other threads `operation` only translates errors.
    """

    def __init__(
        self,
        board: Board,
        me: Status,
        size: int,
        *,
        store_host: str,
        deadline_s: float,
        beat_s: float,
        grace_s: float,
        before_exit: Callable[[], None] = lambda: None,
    ) -> None:
        self._board, self._size, self._store_host = board, size, store_host
        self._deadline_s, self._beat_s, self._grace_s = deadline_s, beat_s, grace_s
        self._before_exit = before_exit
        self._owner = threading.get_ident()
        self._lock = threading.Lock()  # guards the fields below
        self._stack: list[_Operation] = []
        self._sequence = 0
        self._progressed = time.monotonic()
        self._status = me
        self._changed, self._stopped = threading.Event(), threading.Event()
        self._failed = (0, "")  # an exception's id and the innermost operation that it left
        self._explaining = False  # the watchdog waits: explaining is bounded by itself
        self._peer_failed_at: float | None = None
        self._checks: list[Callable[[], None]] = []
        self._threads = [
            threading.Thread(target=self._beat, name="equipoise-beat", daemon=True),
            threading.Thread(target=self._watchdog, name="equipoise-watchdog", daemon=True),
        ]

    def start(self) -> None:
        """Publishes the first status, then starts the threads."""
        self._board.publish(self._next_status())
        for thread in self._threads:
            thread.start()

    def stop(self, error: BaseException | None) -> None:
        """Publishes how this rank ended and stops the threads. Never raises; bounded in time."""
        changes: dict[str, Any] = {"state": "failed" if error else "left"}
        if error is not None:
            changes["error"] = describe(error)
            if self._failed[0] == id(error):
                changes["operation"] = self._failed[1]
        self._stopped.set()
        self._changed.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(STORE_S)
        bounded(lambda: self._publish_end(**changes), STORE_S)

    @contextlib.contextmanager
    def operation(
        self, name: str, group: dist.ProcessGroup | None = None, deadline_s: float | None = None
    ) -> Iterator[None]:
        """Runs a block as the named operation of this rank.

        Communication errors leave it as RankFailure, naming the missing ranks of `group`. When it makes no
        progress for `deadline_s` seconds the process ends with WATCHDOG_EXIT_CODE. Entering and leaving an
        inner operation is progress. Defaults are those of the operation around it, else all ranks and the
        deadline of the Watch.
        """
        current = _Operation(name, group, 0.0, True)
        recorded = threading.get_ident() == self._owner
        if recorded:
            with self._lock:
                outer = self._stack[-1] if self._stack else _Operation("", None, self._deadline_s, False)
                current = _Operation(
                    f"{outer.path} / {name}" if outer.path else name,
                    group or outer.group,
                    deadline_s or outer.deadline_s,
                    outer.stated or deadline_s is not None,
                )
                self._stack.append(current)
                self._sequence += 1
                self._progressed = time.monotonic()
            self._changed.set()
        try:
            yield
        except Exception as error:
            if not is_communication_error(error):
                self._note_failure(error)
                raise
            self._explaining = True
            try:
                failure = RankFailure(self._explain(current, describe(error)))
            finally:
                self._explaining = False
            self._note_failure(failure)
            raise failure from error
        finally:
            if recorded:
                with self._lock:
                    self._stack.pop()
                    self._progressed = time.monotonic()
                self._changed.set()

    def progress(self) -> None:
        """Tells the watchdog that a long operation advances."""
        with self._lock:
            self._progressed = time.monotonic()

    def add_check(self, check: Callable[[], None]) -> Callable[[], None]:
        """Has the watchdog call `check` several times a second, from its thread, while an operation runs, until what is
        returned is called.

        For failures that the host could learn of while it waits for a device that will not answer any more: a kernel
        has given up, and a collective queued behind it waits for a rank that is gone. The process has FOUND_S, or
        `grace_s` if that is less, to raise by itself or to come to another operation; then it ends with
        WATCHDOG_EXIT_CODE and what `check` raised. `check` must not block.
        """
        self._checks = [*self._checks, check]  # lists are replaced, since the watchdog walks through them

        def remove() -> None:
            self._checks = [known for known in self._checks if known is not check]

        return remove

    def _finding(self) -> str | None:
        """What a check has found."""
        for check in self._checks:
            try:
                check()
            except Exception as error:
                return describe(error)
        return None

    def _note_failure(self, error: BaseException) -> None:
        """Keeps the innermost operation that an exception left."""
        with self._lock:
            if self._stack and self._failed[0] != id(error):
                self._failed = (id(error), self._stack[-1].path)

    def _next_status(self, **changes: Any) -> Status:
        with self._lock:
            operation = self._stack[-1].path if self._stack else ""
            seconds = time.monotonic() - self._progressed
            now = {"operation": operation, "sequence": self._sequence, "seconds": seconds}
            self._status = advance(self._status, **{**now, **changes})
            return self._status

    def _publish_end(self, **changes: Any) -> None:
        status = self._next_status(**changes)
        if status.state == "failed":
            self._board.publish_failure(status)
        else:
            self._board.publish(status)

    def _beat(self) -> None:
        pause_s = max(0.05, self._size / PUBLICATIONS_PER_S)
        looked = 0.0
        while not self._stopped.wait(pause_s):
            self._changed.wait(self._beat_s)
            self._changed.clear()
            if self._stopped.is_set():
                return
            try:
                self._board.publish(self._next_status())
                if self._peer_failed_at is None and time.monotonic() - looked > self._beat_s / 2:
                    looked = time.monotonic()
                    if self._board.first_failure() is not None:
                        self._peer_failed_at = time.monotonic()
            except Exception:  # the store is away: an operation that needs it, or the watchdog, will say so
                self._stopped.wait(self._beat_s)

    def _watchdog(self) -> None:
        tick_s = min(1.0, self._deadline_s / 10, self._grace_s / 4)
        found_at: float | None = None
        while not self._stopped.wait(tick_s):
            with self._lock:
                operation = self._stack[-1] if self._stack else None
                progressed = self._progressed
            if operation is None or self._explaining:
                continue
            elapsed = time.monotonic() - progressed
            reason = f"made no progress for {elapsed:.1f} s (deadline {operation.deadline_s:g} s)"
            late = elapsed > operation.deadline_s
            if not late and self._peer_failed_at is not None and not operation.stated:
                since = time.monotonic() - max(progressed, self._peer_failed_at)
                late = since > self._grace_s
                reason = f"made no progress for {since:.1f} s after a rank had failed"
            if (finding := self._finding()) is not None:
                found_at = found_at or time.monotonic()
                late = late or time.monotonic() - max(progressed, found_at) > min(self._grace_s, FOUND_S)
                reason = finding
            else:
                found_at = None
            if late:
                message = self._explain(operation, reason)
                with self._lock:
                    still = self._stack[-1:] == [operation] and self._progressed == progressed
                if still and not self._stopped.is_set():
                    self._end_process(message)

    def explain(self, name: str, reason: str) -> str:
        """The message of a RankFailure among all ranks: what failed here, who is missing. Takes beats."""
        return self._explain(_Operation(name, None, 0.0, True), reason)

    def _explain(self, operation: _Operation, reason: str) -> str:
        members: Sequence[int] = range(self._size)
        group_name = "all ranks"
        if operation.group is not None:
            members = dist.get_process_group_ranks(operation.group)
            group_name = f'group "{operation.group.group_desc}" (ranks {shorten_ranks(members)})'
        with self._lock:
            me = replace(self._status, operation=operation.path, sequence=self._sequence)
        patience_s = 3 * self._beat_s + self._size / PUBLICATIONS_PER_S

        def find() -> str:
            return explain(investigate(self._board, me, members, patience_s), members)

        # All ranks of a large group reading all statuses would take the store minutes.
        ask = find if len(members) <= ASK_EACH else lambda: self._board.share(find, me.where(), 2 * patience_s)
        done, result = bounded(ask, 2 * patience_s + STORE_S)
        if not done or isinstance(result, BaseException):
            why = describe(result) if isinstance(result, BaseException) else f"no answer in {STORE_S:g} s"
            result = (
                f"  the store of the run ({self._store_host}) cannot be read, so its host is likely dead or "
                f"cut off: look there first ({why})"
            )
        return f'"{operation.path}" on rank {me.rank} of {self._size}, among {group_name}: {reason}\n{result}'

    def _end_process(self, message: str) -> NoReturn:
        self._write(f"\nRankFailure: {message}\nStacks of rank {self._status.rank}, pid {os.getpid()}:\n")
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(2, all_threads=True)
        self._write(f"The process ends with exit code {WATCHDOG_EXIT_CODE}.\n")
        error = f"RankFailure: {message}"[:ERROR_CHARACTERS]
        bounded(lambda: self._publish_end(state="failed", error=error), STORE_S)
        bounded(self._before_exit, STORE_S)
        os._exit(WATCHDOG_EXIT_CODE)

    @staticmethod
    def _write(text: str) -> None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            os.write(2, text.encode())


def describe(error: BaseException) -> str:
    """An exception's class and text, shortened, as it is published."""
    return f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]


def bounded(call: Callable[[], Any], seconds: float) -> tuple[bool, Any]:
    """Runs a call that may block for ever; (whether it ended in time, its result or its exception).

    A call that does not end is left behind in a daemon thread, which also keeps alive what it refers to.
    """
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, name="equipoise-bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    return (True, result[0]) if result else (False, None)
