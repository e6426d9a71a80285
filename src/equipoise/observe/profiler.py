"""Torch's profiler on a schedule: a few steps at a time, each window a Chrome trace, a text summary and, where the
device has them, a memory snapshot.

The profiler exists only while a window is open. So steps outside cost nothing, and memory does not grow with the run.
"""

import gzip
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, PositiveInt, model_validator
from torch.profiler import ProfilerActivity, record_function

from equipoise.accelerator import Accelerator
from equipoise.config import Config
from equipoise.errors import ConfigError
from equipoise.files import written_whole
from equipoise.observe.profile_summary import STEP, render_summary, summarize_trace

logger = logging.getLogger(__name__)

FOLDER = "profile"
"""Folder of the windows inside a run folder."""
_LARGEST_SUMMARIZED = 400 << 20
_MEMORY_ENTRIES = 200_000


class ProfilerConfig(Config):
    """Profiles a few steps at a time: Chrome traces with named ranges of the MoE layer, and what each phase costs."""

    first_step: int = Field(10, ge=2)
    """First optimizer step of the first window; the step before each window warms the profiler up."""
    steps: int = Field(3, ge=1, le=100)
    """Optimizer steps of a window. A trace is held in memory until its window ends."""
    every: int = Field(0, ge=0)
    """Steps from the start of one window to that of the next; 0 profiles one window only."""
    windows: PositiveInt = 4
    """Windows at most."""
    ranks: tuple[int, ...] = Field((0,), min_length=1)
    """Ranks that are profiled, each into files of its own."""
    shapes: bool = False
    """Record the shapes of every operation's inputs."""
    stacks: bool = False
    """Record the Python stack of every operation; slows the profiled steps down."""
    memory: bool = False
    """Record allocations in the trace, and write a memory snapshot where the device's allocator keeps a history."""

    @model_validator(mode="after")
    def _windows_apart(self) -> Self:
        if self.every and self.every <= self.steps:
            raise ValueError(
                f"profiler.every is {self.every} but a window takes profiler.steps = {self.steps} steps and one to "
                f"warm up: choose at least {self.steps + 1}, or 0 for one window"
            )
        return self

    def window_at(self, step: int) -> bool:
        """Whether this is the step before a window."""
        behind = step - (self.first_step - 1)
        if self.every == 0:
            return behind == 0
        return behind >= 0 and behind % self.every == 0 and behind // self.every < self.windows


def check_ranks(config: ProfilerConfig, world_size: int) -> None:
    """Raises ConfigError for a rank that the run does not have."""
    missing = [rank for rank in config.ranks if not 0 <= rank < world_size]
    if missing:
        raise ConfigError(
            f"profiler.ranks names rank {missing[0]}, but the run has ranks 0 to {world_size - 1}: choose among them"
        )


class Profiler:
    """Profiles the steps of one rank that the settings name; does nothing on other ranks and without settings.

        profiler = Profiler(config, accelerator, run_dir / FOLDER, rank)
        with profiler, ...:
            with profiler.step(number): ...

    Files of a window, each written beside its place and renamed: `steps-A-B.rank-R.trace.json.gz` (chrome://tracing,
    ui.perfetto.dev), `.summary.txt` and `.summary.json`, `.memory.pickle` (pytorch.org/memory_viz).
    """

    def __init__(self, config: ProfilerConfig | None, accelerator: Accelerator, folder: Path, rank: int) -> None:
        self.config = config if config is not None and rank in config.ranks else None
        self.accelerator, self.folder, self.rank = accelerator, folder, rank
        self._profile: Any = None
        self._recorded: list[int] = []
        self._has_history = False

    def __enter__(self) -> Self:
        if self.config is not None:
            for line in self._choices():
                logger.info(line)
        return self

    def __exit__(self, *failure: object) -> None:
        if self._profile is not None:
            if self._recorded and failure[0] is None:
                self._write()  # the run ended inside the window
            else:
                self._drop()

    def _choices(self) -> list[str]:
        """What is recorded on this device, in words for the log."""
        assert self.config is not None
        answer = self.accelerator.supports("profiler")
        lines = [f"profiler: {'the device too' if answer else 'the host only'} ({answer.reason}), into {self.folder}"]
        if self.config.memory:
            snapshot = self.accelerator.supports("memory_snapshot")
            how = "snapshots and" if snapshot else "no snapshots, only"
            lines.append(f"profiler: memory as {how} allocations in the trace ({snapshot.reason})")
        return lines

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around one optimizer step. An error inside it ends the window without files; files that cannot be written
        are a warning."""
        if self.config is None:
            yield
            return
        if self._profile is not None:
            self._recorded.append(number)
        elif self.config.window_at(number):
            self._start()
        try:
            with record_function(f"{STEP}{number}"):
                yield
        except BaseException:
            self._drop()
            raise
        if self._profile is None:
            return
        if len(self._recorded) == self.config.steps:
            self._write()
        else:
            self._profile.step()

    def _start(self) -> None:
        assert self.config is not None
        activities = {ProfilerActivity.CPU, self.accelerator.profiler_activity() or ProfilerActivity.CPU}
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=self.config.steps, repeat=1)
        self._profile = torch.profiler.profile(
            activities=list(activities),
            schedule=schedule,
            record_shapes=self.config.shapes,
            with_stack=self.config.stacks,
            profile_memory=self.config.memory,
        )
        self._profile.start()
        self._has_history = self.config.memory and bool(self.accelerator.supports("memory_snapshot"))
        if self._has_history:
            self.accelerator.record_memory_history(_MEMORY_ENTRIES)

    def _write(self) -> None:
        """Ends the window and writes its files."""
        profile, self._profile = self._profile, None
        steps, self._recorded = self._recorded, []
        try:
            self.accelerator.synchronize()
            profile.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            stem = self._free_stem(f"steps-{steps[0]}-{steps[-1]}.rank-{self.rank}")
            if self._has_history:
                with written_whole(self.folder / f"{stem}.memory.pickle") as partial:
                    self.accelerator.dump_memory_snapshot(partial)
            plain = self.folder / f"{stem}.trace.json.tmp"
            profile.export_chrome_trace(str(plain))
            del profile
            self._summarize(plain, stem)
            with (
                written_whole(self.folder / f"{stem}.trace.json.gz") as packed,
                open(plain, "rb") as source,
                gzip.open(packed, "wb", compresslevel=3) as target,
            ):
                shutil.copyfileobj(source, target)
            plain.unlink()
        except OSError as error:  # the run matters more than its profile
            logger.warning("no profile of steps %s in %s: %s", steps, self.folder, error.strerror or error)
        finally:
            self._stop_history()

    def _summarize(self, trace: Path, stem: str) -> None:
        if trace.stat().st_size > _LARGEST_SUMMARIZED:
            logger.warning("%s is too large for a summary here: profile fewer steps (profiler.steps)", stem)
            return
        summary = summarize_trace(json.loads(trace.read_bytes()))
        text = render_summary(summary)
        for suffix, content in (("txt", text), ("json", json.dumps(summary.to_json(), indent=1) + "\n")):
            with written_whole(self.folder / f"{stem}.summary.{suffix}") as partial:
                partial.write_text(content)
        logger.info("profile of %s in %s\n%s", stem.replace(".", ", "), self.folder, text)

    def _free_stem(self, stem: str) -> str:
        """A run that is resumed may profile a step again: the earlier files stay."""
        number, free = 1, stem
        while (self.folder / f"{free}.trace.json.gz").exists():
            number += 1
            free = f"{stem}.again-{number}"
        return free

    def _drop(self) -> None:
        profile, self._profile, self._recorded = self._profile, None, []
        self._stop_history()
        if profile is None:
            return
        profile.on_trace_ready = None
        profile.stop()

    def _stop_history(self) -> None:
        if self._has_history:
            self._has_history = False
            self.accelerator.record_memory_history(None)
