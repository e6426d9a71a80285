"""Where the time of an update goes. Phases overlap, so they add to more than the whole."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from equipoise.accelerator import Accelerator


@dataclass
class Phases:
    """Seconds by phase: `host` of the host's clock, `device` of a stream's work (known once `finish` has waited)."""

    accelerator: Accelerator
    seconds: dict[str, float] = field(default_factory=dict)
    engine: dict[str, float] = field(default_factory=dict)
    _events: list[tuple[str, Any, Any]] = field(default_factory=list)

    @contextlib.contextmanager
    def host(self, name: str) -> Iterator[None]:
        """Counts the block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    @contextlib.contextmanager
    def device(self, name: str) -> Iterator[None]:
        """Counts what the block puts on the current stream."""
        start, end = (self.accelerator.event(timing=True) for _ in range(2))
        start.record()
        try:
            yield
        finally:
            end.record()
            self._events.append((name, start, end))

    def add_engine(self, ranks: Any) -> None:
        """What an engine says of its ranks' seconds, if it does: the longest of each phase counts."""
        for rank in ranks or ():
            for name, value in rank.items():
                self.engine[name] = max(self.engine.get(name, 0.0), float(value))

    def finish(self) -> dict[str, float]:
        """All phases, after waiting for the device."""
        self.accelerator.synchronize()
        for name, start, end in self._events:
            self.seconds[name] = self.seconds.get(name, 0.0) + start.elapsed_ms(end) / 1e3
        self._events = []
        return self.seconds


@dataclass(frozen=True)
class UpdateReport:
    """What an update did. num_bytes: of all buckets. seconds: of the whole, from pause to resume. phases: seconds by
    phase on this rank. engine_phases: of the slowest engine rank, where engines say; on rank 0. extra_bytes: memory
    that this rank took for buckets."""

    version: str
    num_bytes: int
    num_buckets: int
    seconds: float
    phases: dict[str, float]
    engine_phases: dict[str, float]
    extra_bytes: int

    @property
    def gigabytes_per_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9 if self.seconds else 0.0
