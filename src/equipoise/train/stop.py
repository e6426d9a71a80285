"""Stopping a run gracefully: a signal asks, the trainer finishes its step, saves, and says so."""

import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

_HANDLED = (signal.SIGTERM, signal.SIGINT)


class StoppedBySignal(BaseException):
    """The run was stopped by a signal after it saved; the command line exits with 128 + `signal_number`.

    Not an `Exception`, so that no handler of errors takes a wanted stop for a failure.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


class StopSignals:
    """While entered, SIGTERM and SIGINT only set `requested`; a second SIGINT raises `KeyboardInterrupt`.

    A signal reaches one process while the others may not see it, so the ranks have to agree on
    `requested` (a maximum over ranks) before they act on it. An instance that is entered inside another
    takes over what that one has heard, and passes on what it hears. Outside the main thread Python allows
    no handlers: entering changes nothing there.

    Args:
        tell: called at the first SIGINT, in the signal's handler.
    """

    def __init__(self, tell: Callable[[], None] | None = None) -> None:
        self._tell = tell
        self.requested = 0
        """Number of the signal that asked for the stop; 0 when none did."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in _HANDLED:
                self._previous[number] = signal.signal(number, self._receive)
            for outer in self._outer():
                self.requested = self.requested or outer.requested
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # A handler that was not installed from Python is reported as None and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def raise_if_requested(self) -> None:
        """Raise `StoppedBySignal` if a signal has asked for the stop."""
        if self.requested:
            raise StoppedBySignal(self.requested)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        again = self.requested == signal.SIGINT == number
        if self._tell is not None and not self.requested and number == signal.SIGINT:
            self._tell()
        self.requested = self.requested or number
        for outer in self._outer():
            outer.requested = outer.requested or number
        if again:
            raise KeyboardInterrupt

    def _outer(self) -> Iterator["StopSignals"]:
        """The instances that were entered before this one, the nearest first."""
        outer = getattr(self._previous.get(signal.SIGTERM), "__self__", None)
        if isinstance(outer, StopSignals):
            yield outer
            yield from outer._outer()
