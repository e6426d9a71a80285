"""Where the time of a step goes: marks recorded into the stream of the device, read when the step is over."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from equipoise.accelerator import Accelerator, Event

Phase = Literal["data", "forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "optimizer")


class PhaseTimer:
    """Times the phases of each step on one device, without a synchronization inside the step.

        timer.start_step()
        with timer.phase("forward"): ...      # any number of times; repeats of a step add up
        metrics = timer.finish_step()         # waits for the device, once

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

    def finish_step(self) -> dict[str, float]:
        """Ends the step and waits for it. Seconds: `time_step_s` (all of it) and `time_<phase>_s`."""
        assert self._start is not None, "finish_step() before start_step()"
        end = self._mark()
        end.synchronize()
        seconds = {f"time_{name}_s": 0.0 for name in ("step", *PHASES)}
        seconds["time_step_s"] = self._start.elapsed_ms(end) / 1000
        for name, start, stop in self._spans:
            seconds[f"time_{name}_s"] += start.elapsed_ms(stop) / 1000
        self._unused.append(end)
        self._recycle()
        return seconds

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
