"""Where the time of a step goes: marks recorded into the stream of the device, read when the step is over."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from equipoise.accelerator import Accelerator, Event

Phase = Literal["data", "forward", "backward", "captured", "optimizer"]
"""captured: forward and backward in one, by a graph of the device."""
PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "optimizer")
"""Of every step; others count where they occur."""


class PhaseTimer:
    """Times the phases of each step on one device, without a synchronization inside the step.

        timer.start_step()
        with timer.phase("forward"): ...      # any number of times; repeats of a step add up
        times = timer.end_step()
        metrics = times.seconds()             # waits for the device, once; at best when the next step is enqueued

    On a device that works asynchronously a phase lasts as its work lasts on the device: host work that the
    device does not wait for, such as fetching a batch ahead, counts as nothing. On CPU it is wall time.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._unused: list[Event] = []  # events of earlier steps, to be recorded anew
        self._spans: list[tuple[Phase, Event, Event]] = []
        self._start: Event | None = None
        self._open: Phase | None = None

    def start_step(self) -> None:
        """Begins a step; what was timed of an unfinished one is dropped."""
        self._recycle()
        self._start = self._mark()

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Times the block as part of `name`. Phases do not nest."""
        assert self._start is not None, "phase() before start_step()"
        assert self._open is None, f"phase {name!r} inside phase {self._open!r}"
        self._open = name
        start = self._mark()
        try:
            yield
        finally:
            self._open = None
            self._spans.append((name, start, self._mark()))

    def end_step(self) -> "StepTimes":
        """Ends the step without waiting for it. The next one may begin before its times are read."""
        assert self._start is not None, "end_step() before start_step()"
        times = StepTimes(self._start, self._spans, self._mark(), self._unused)
        self._start, self._spans = None, []
        return times

    def finish_step(self) -> dict[str, float]:
        """Ends the step and waits for it; see `StepTimes.seconds`."""
        return self.end_step().seconds()

    def _mark(self) -> Event:
        event = self._unused.pop() if self._unused else self.accelerator.event(timing=True)
        event.record()
        return event

    def _recycle(self) -> None:
        for _, start, stop in self._spans:
            self._unused += [start, stop]
        self._spans.clear()
        if self._start is not None:
            self._unused.append(self._start)
            self._start = None


class StepTimes:
    """The times of a step that has been enqueued."""

    def __init__(self, start: Event, spans: list[tuple[Phase, Event, Event]], end: Event, unused: list[Event]) -> None:
        self._start, self._spans, self._end, self._unused = start, spans, end, unused

    def wait(self) -> None:
        """Until the device is done with the step."""
        self._end.synchronize()

    def seconds(self) -> dict[str, float]:
        """Waits for the step: `time_step_s` (all of it) and `time_<phase>_s`. May be called once."""
        self.wait()
        seconds = {f"time_{name}_s": 0.0 for name in ("step", *PHASES)}
        seconds["time_step_s"] = self._start.elapsed_ms(self._end) / 1000
        for name, start, stop in self._spans:
            key = f"time_{name}_s"
            seconds[key] = seconds.get(key, 0.0) + start.elapsed_ms(stop) / 1000
            self._unused += [start, stop]
        self._unused += [self._start, self._end]
        return seconds
