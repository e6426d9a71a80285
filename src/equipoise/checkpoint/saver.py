"""Saving the whole training state, with `torch.distributed.checkpoint` for the tensors, while training goes on.

A save has three parts. *Start*, together on all ranks: the folder `step-<n>.tmp` is made, torch plans who writes what,
and what this rank is to write is copied into host memory. *Write*, in a thread of each rank: its shards, their
checksums. *Publish*, in a thread of rank 0, once every rank has written: the index, what is not a tensor, the manifest,
the rename, and only then the deletion of old ones. So, whatever dies, a complete one exists at each moment. Threads
use files only, never a process group: what they have done is told to the other ranks by the thread that trains.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from torch.distributed import checkpoint as dcp

from equipoise.accelerator import Accelerator
from equipoise.checkpoint import layout
from equipoise.checkpoint.manifest import Manifest, describe_file, write_json
from equipoise.checkpoint.shards import LaterWriter
from equipoise.checkpoint.staging import Staged, Staging
from equipoise.checkpoint.state import TrainingState, check_same_everywhere, collect
from equipoise.checkpoint.together import is_distributed, together, torch_checkpoint
from equipoise.distributed.world import World
from equipoise.errors import CheckpointError

logger = logging.getLogger(__name__)

REMEDY = "Earlier checkpoints are untouched. Check space and permissions, or choose another run folder."
ABANDON_S = 10.0  # that a run which fails waits for the thread that writes
NOTED_S = 1.0  # a wait for the save before that is worth a warning
_TICK_S = 1.0


class Progress(IntEnum):
    """What this rank's thread is at. The largest of all ranks' says what the next step of the save is."""

    DONE = 0  # also without a save
    BUSY = 1
    FAILED = 2


class CheckpointSaver:
    """Saves the states of one run into `directory`, one at a time. All methods but `progress` and `close` are
    collective: every rank calls them, and an error on one is raised on all.

    `keep_last` newest checkpoints are kept (0: all), and those of steps that are a multiple of `keep_every` (0: none).
    `last_step` is the step of the newest complete one that is known, None without one.
    """

    def __init__(
        self,
        directory: Path,
        world: World,
        keep_last: int = 0,
        keep_every: int = 0,
        last_step: int | None = None,
    ) -> None:
        self.directory, self.world = Path(directory), world
        self.keep_last, self.keep_every = keep_last, keep_every
        self.last_step = last_step
        self._staging = Staging(world.accelerator)
        self._save: _Save | None = None

    @property
    def progress(self) -> Progress:
        """Of this rank; to be exchanged at the end of each step, and its largest value given to `advance`."""
        return Progress.DONE if self._save is None else self._save.task.progress

    def advance(self, worst: int) -> None:
        """Goes on with a save whose threads have ended. `worst` is the largest `progress` of all ranks.

        Raises CheckpointError, with earlier checkpoints untouched, if a thread of any rank has failed.
        """
        if self._save is not None and worst != Progress.BUSY:
            self._finish_part(self._save)

    def save(self, state: TrainingState, wait: bool = True) -> Path:
        """Saves `state` as `directory/step-<step>` and returns that path; without `wait` it is complete only after
        later calls of `advance` or `finish`. A step that is the last one saved is not saved again.

        Raises CheckpointError on every rank, with the earlier checkpoints untouched, if the step is saved already,
        the folder can't be written (full, read-only, not shared between nodes), or what is saved once for all
        differs between ranks.
        """
        waited_for = self._save
        started = time.monotonic()
        self.finish()
        waited_s = time.monotonic() - started
        if waited_for is not None and not wait and waited_s >= NOTED_S and self.world.rank == 0:
            logger.warning(
                "the save of step %d was still being written when that of step %d was due: training waited for "
                "%.1f s. Save less often (checkpoint.every), or to faster storage",
                waited_for.step,
                state.step,
                waited_s,
            )
        if self.last_step != state.step:
            self._save = self._start(state, stage=not wait)
            if wait:
                self.finish()
        return layout.step_path(self.directory, state.step)

    def finish(self) -> None:
        """Waits until the save that is under way, if there is one, is complete."""
        while self._save is not None:
            self._finish_part(self._save)

    def close(self) -> None:
        """Lets go of a save that nobody will finish because the run fails; waits a little for its thread."""
        if self._save is not None:
            self._save.task.wait(ABANDON_S)
            self._save = None

    def _start(self, state: TrainingState, stage: bool) -> "_Save":
        world, final = self.world, layout.step_path(self.directory, state.step)
        failure = f"cannot write checkpoint {final}"
        partial = layout.partial_path(final)
        with world.operation(f"step {state.step}: save checkpoint"):
            with together(world, failure, REMEDY):
                if world.rank == 0:
                    layout.prepare_partial(final)
            try:
                with together(world, failure, REMEDY):
                    if not partial.is_dir():
                        raise CheckpointError(
                            f"rank {world.rank} does not see {partial}, which rank 0 has made. "
                            "The run folder has to be on storage that all nodes share."
                        )
                    tensors, train_state = collect(state, world)
                check_same_everywhere(tensors, train_state, world)
                shards = LaterWriter(partial, world.rank)
                with torch_checkpoint(failure, REMEDY):
                    dcp.save(
                        tensors,
                        storage_writer=shards,
                        planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
                        process_group=world.group if is_distributed(world) else None,
                        no_dist=not is_distributed(world),
                    )
                with together(world, failure, REMEDY):
                    tensors_of_rank = shards.tensors()
                    staged = self._staging.copy(tensors_of_rank) if stage else Staged(tensors_of_rank, None)
            except CheckpointError:
                if world.rank == 0:
                    layout.discard_partial(final)
                raise

        def write() -> None:
            staged.wait()
            shards.write(staged.tensors)

        task = _Task(write, world.accelerator)
        return _Save(state.step, final, failure, shards, train_state, task)

    def _finish_part(self, save: "_Save") -> None:
        """Waits for this rank's thread, then for the others'; then rank 0 starts to publish, or the save is over."""
        world = self.world
        with world.operation(f"step {save.step}: write checkpoint"):
            try:
                with together(world, save.failure, REMEDY):
                    while not save.task.wait(_TICK_S):
                        if save.shards.has_grown():
                            with world.operation("files"):  # tells the watchdog that it advances
                                pass
                    save.task.result()
            except CheckpointError:
                self._save = None
                if world.rank == 0:
                    layout.discard_partial(save.final)
                raise
        if save.publishing:
            self._save, self.last_step = None, save.step
            return
        save.publishing = True
        save.task = _Task(lambda: self._publish(save) if world.rank == 0 else None, world.accelerator)

    def _publish(self, save: "_Save") -> None:
        files = save.shards.write_index(self.world.size)
        partial = layout.partial_path(save.final)
        write_json(partial / layout.TRAIN_STATE, save.train_state)
        files |= {path.name: describe_file(path) for path in partial.iterdir() if path.name not in files}
        layout.publish(partial, save.final, Manifest(save.step, self.world.size, files))
        layout.delete_old(self.directory, save.step, self.keep_last, self.keep_every)


def save_checkpoint(directory: Path, state: TrainingState, world: World, keep_last: int = 0) -> Path:
    """Saves `state` as `directory/step-<step>` and returns that path once it is complete and on storage.

    One save alone; see `CheckpointSaver.save` for what it raises. Refuses a step that is saved already.
    """
    return CheckpointSaver(directory, world, keep_last).save(state)


@dataclass
class _Save:
    """One save under way."""

    step: int
    final: Path
    failure: str  # how its errors begin
    shards: LaterWriter
    train_state: dict[str, Any]
    task: "_Task"
    publishing: bool = False  # all ranks have written


class _Task:
    """A call in a thread of its own, which ends with the process."""

    def __init__(self, call: Callable[[], None], accelerator: Accelerator) -> None:
        self._call, self._ended = call, threading.Event()
        self._error: BaseException | None = None
        self._accelerator = accelerator
        self._device_index = accelerator.current_device_index()
        threading.Thread(target=self._run, name="equipoise-checkpoint", daemon=True).start()

    def _run(self) -> None:
        try:
            if self._accelerator.device_type != "cpu":
                self._accelerator.set_device(self._device_index)  # the current device is a thread's own
            self._call()
        except BaseException as error:
            self._error = error
        self._ended.set()

    @property
    def progress(self) -> Progress:
        if not self._ended.is_set():
            return Progress.BUSY
        return Progress.DONE if self._error is None else Progress.FAILED

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within `seconds`."""
        return self._ended.wait(seconds)

    def result(self) -> None:
        """Raises what the call raised."""
        if self._error is not None:
            raise self._error
