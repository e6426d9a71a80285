"""The engine's one thread of control, on rank 0: what may happen when, and who is told.

Requests of clients come in from other threads as futures. Between two steps the loop does one thing at a time on every
rank. Whatever waits for other processes (joining a group, arriving buckets) runs in jobs on the ranks; the loop looks
after them and goes on.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from equipoise.distributed.weight_update import Manifest
from equipoise.errors import WeightUpdateError
from equipoise.serve.ranks import Ranks, RanksError, Refused
from equipoise.serve.request import Finished, Prompt
from equipoise.serve.worker import TAGS, WEIGHTS

logger = logging.getLogger(__name__)

PauseMode = Literal["abort", "retract", "in_place"]
BEAT_S = 20.0
"""Ranks that wait for a command hear something at least so often."""


class Unavailable(Refused):
    """The engine does not generate now; it may later."""


@dataclass
class _Update:
    """An open update: between begin and commit."""

    update_id: str
    manifest: Manifest
    progress_at: float = field(default_factory=time.monotonic)


@dataclass
class _Pending:
    """A job on every rank, and who waits for it."""

    future: "Future[Any]"
    update: _Update | None


class EngineLoop:
    """See the module docstring. Public methods may be called from any thread and return futures."""

    def __init__(self, ranks: Ranks, first: Any, version: str, stall_s: float = 300.0) -> None:
        """`first`: rank 0's Worker. `stall_s`: an update in which nothing happens for so long is given up."""
        self.ranks, self.worker, self.stall_s = ranks, first, stall_s
        self.version = version
        self.dirty: str | None = first.receiver.dirty
        self.is_paused = False
        self.failure: str | None = None
        self.released: set[str] = set()
        self.num_updates = 0
        self._queue: queue.Queue[tuple[Future[Any], Callable[[], Any]]] = queue.Queue()
        self._requests: dict[str, Future[Finished]] = {}
        self._prompts: dict[str, Prompt] = {}
        self._rank_of: dict[str, int] = {}
        self._new: list[list[Prompt]] = [[] for _ in range(ranks.size)]
        self._pending: dict[str, _Pending] = {}
        self._update: _Update | None = None
        self._job_number = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends it: open requests end as aborted."""
        self._closing.set()
        self._queue.put((Future(), lambda: None))  # wakes it
        self._thread.join(30)

    @property
    def is_alive(self) -> bool:
        """Whether the engine can do anything at all."""
        return self.failure is None and self._thread.is_alive()

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def call(self, act: Callable[[], Any]) -> "Future[Any]":
        """Runs one of the methods below between two steps. A future that it returns is waited for in its place."""
        future: Future[Any] = Future()
        if not self.is_alive:
            future.set_exception(Unavailable(f"the engine has failed: {self.failure or 'it was closed'}"))
        else:
            self._queue.put((future, act))
        return future

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
        except BaseException as error:
            logger.exception("the engine's loop has failed")
            self.failure = f"{type(error).__name__}: {error}"
        self._end()

    def _end(self) -> None:
        reason = Unavailable(f"the engine has ended: {self.failure or 'it was closed'}")
        waiting: list[Future[Any]] = [*self._requests.values(), *(p.future for p in self._pending.values())]
        while not self._queue.empty():
            waiting.append(self._queue.get()[0])
        for future in waiting:
            if not future.done():
                future.set_exception(reason)
        self.worker.close()
        if self.failure is None:
            self.ranks.stop()
        else:
            self.ranks.give_up()

    def _turn(self) -> None:
        """Everything that was asked for, what has ended, then a step."""
        can_step = bool(self._requests) and not self.is_paused and self.why_not() is None
        idle_s = 0.0 if can_step else 0.0005 if self._pending else BEAT_S if self._update is None else 0.5
        try:
            future, act = self._queue.get(timeout=idle_s) if idle_s else self._queue.get_nowait()
        except queue.Empty:
            if idle_s == BEAT_S:
                self.ranks.run("nothing")
        else:
            self._do(future, act)
        self._end_jobs()
        self._give_up_stalled()
        if can_step and not self.is_paused and self.why_not() is None:
            self._step()

    def _do(self, future: "Future[Any]", act: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = act()
        except Exception as error:
            future.set_exception(error)
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda inner: _pass_on(inner, future))
        else:
            future.set_result(result)

    def _step(self) -> None:
        add = [[p.model_dump(mode="json") for p in prompts] for prompts in self._new]
        self._new = [[] for _ in range(self.ranks.size)]
        self._finish(self.ranks.run("step", add=add if any(add) else []))

    def _finish(self, by_rank: list[list[dict[str, Any]]]) -> None:
        for value in (v for values in by_rank for v in values):
            finished = Finished(**value)
            self._rank_of.pop(finished.rid, None)
            self._prompts.pop(finished.rid, None)
            future = self._requests.pop(finished.rid, None)
            if future is not None and not future.done():
                future.set_result(finished)

    # Generation

    def why_not(self) -> str | None:
        """Why the engine cannot generate, pauses aside; None if it can."""
        if self._update is not None:
            return f"an update to version {self._update.manifest.version!r} is under way"
        if self.dirty is not None:
            return f"the weights are not usable: {self.dirty}. Send a complete update"
        if self.released:
            return f"memory is released: {', '.join(sorted(self.released))}"
        return None

    def check_available(self) -> None:
        """Raises Unavailable while new requests are not taken."""
        reason = self.why_not() or ("generation is paused" if self.is_paused else None)
        if reason is not None:
            raise Unavailable(reason)

    def generate(self, prompt: Prompt) -> "Future[Finished]":
        """Queues a request. Raises Unavailable while the engine does not generate, Refused for a name that is taken."""
        self.check_available()
        if prompt.rid in self._requests:
            raise Refused(f"there is a request {prompt.rid!r} already")
        loads = [list(self._rank_of.values()).count(rank) for rank in range(self.ranks.size)]
        rank = loads.index(min(loads))
        self._rank_of[prompt.rid] = rank
        self._prompts[prompt.rid] = prompt
        self._new[rank].append(prompt)
        future: Future[Finished] = Future()
        self._requests[prompt.rid] = future
        return future

    def abort(self, rid: str | None) -> int:
        """Ends a request, or all; the number of requests that ended."""
        rids = list(self._requests) if rid is None else [r for r in self._requests if r.startswith(rid)]
        self._abort(rids if rid is not None else None)
        return len(rids)

    def withdraw(self, prompt: Prompt) -> None:
        """Ends this request alone; harmless when it has ended, or was refused for a name that another one has."""
        if self._prompts.get(prompt.rid) is prompt:
            self._abort([prompt.rid])

    def _abort(self, rids: list[str] | None) -> None:
        self._send_new()
        self._finish(self.ranks.run("abort", rids=rids))

    def _send_new(self) -> None:
        """Brings requests to their ranks without computing anything."""
        if any(self._new):
            add = [[p.model_dump(mode="json") for p in prompts] for prompts in self._new]
            self._new = [[] for _ in range(self.ranks.size)]
            self.ranks.run("add", add=add)

    def pause(self, mode: PauseMode) -> None:
        """Stops generating. `abort` ends what runs, `retract` puts it back in the queue, `in_place` leaves it. Twice is
        harmless."""
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            self._send_new()
            self.ranks.run("retract")
        self.is_paused = True

    def resume(self) -> None:
        """Goes on generating. Raises Refused while it cannot; twice is harmless."""
        reason = self.why_not()
        if reason is not None:
            raise Refused(reason)
        self.is_paused = False

    def flush(self) -> None:
        """Forgets kept keys and values. Raises Refused while requests are computed."""
        running = sum(count for count, _ in self._loads()) if self._requests else 0
        if running and not self.is_paused:
            raise Refused(f"{running} requests are running: pause or abort them first")
        self.ranks.run("flush")

    def loads(self) -> list[dict[str, int]]:
        """Running and waiting requests of each rank."""
        return [{"running": running, "waiting": waiting} for running, waiting in self._loads()]

    def _loads(self) -> list[tuple[int, int]]:
        found = [tuple(pair) for pair in self.ranks.run("loads")]
        return [(running, waiting + len(new)) for (running, waiting), new in zip(found, self._new)]

    # Weight updates

    def begin(
        self, update_id: str, version: str, digest: str, manifest: dict[str, Any] | None, take_over: bool
    ) -> None:
        """Opens an update. Refused while the engine generates, or while another is open (unless it takes over)."""
        if not self.is_paused:
            raise Refused("the engine is generating: pause_generation first")
        if self._update is not None:
            if not take_over:
                raise Refused(
                    f"update {self._update.update_id!r} to version {self._update.manifest.version!r} is open: commit "
                    "or abandon it, or begin with take_over if its trainer is gone"
                )
            self.abandon(None, f"update {update_id!r} took over")
        self._on_ranks("begin", manifest=manifest, version=version, digest=digest)
        opened = self.worker.receiver.manifest
        assert opened is not None
        self._update = _Update(update_id, opened)

    def _of(self, update_id: str) -> _Update:
        if self._update is None:
            raise Refused("no update is open: begin_weight_update first")
        if update_id != self._update.update_id:
            raise Refused(f"update {update_id!r} is not the open one: it was given up, or another took over")
        self._update.progress_at = time.monotonic()
        return self._update

    def receive(self, update_id: str, group: str, indices: list[int]) -> "Future[Any]":
        """Lets every rank receive buckets through a group."""
        update = self._of(update_id)
        return self._start(update, "start_receive", group=group, indices=indices)

    def load(self, update_id: str, offers: list[dict[str, Any]]) -> "Future[Any]":
        """Lets every rank take buckets from memory of this machine."""
        update = self._of(update_id)
        if len(offers) != self.ranks.size:
            raise Refused(f"{len(offers)} offers for {self.ranks.size} engine ranks: expected one for each")
        return self._start(update, "start_load", offers=offers)

    def commit(self, update_id: str, checksums: list[list[int]]) -> str:
        """Closes the update: its version is what the weights are called from now on."""
        self._of(update_id)
        if self._pending:
            raise Refused("buckets are still arriving: wait for their requests")
        try:
            (self.version, *_) = self.ranks.run("commit", sums=checksums)
        except RanksError as error:
            self._ended(str(error))
            raise
        self._update, self.dirty, self.num_updates = None, None, self.num_updates + 1
        return self.version

    def abandon(self, update_id: str | None, reason: str) -> None:
        """Gives the open update up; harmless without one, or when it is another."""
        if self._update is None or update_id not in (None, self._update.update_id):
            return
        self._ended(reason)

    def _ended(self, reason: str) -> None:
        update, self._update = self._update, None
        found = [text for text in self.ranks.run("abandon", reason=reason) if text is not None]
        if found:
            self.dirty = found[0]
        for job, pending in list(self._pending.items()):
            if pending.update is update:
                del self._pending[job]
                pending.future.set_exception(WeightUpdateError(f"the update was given up: {reason}"))

    def _give_up_stalled(self) -> None:
        update = self._update
        if update is None:
            return
        if any(pending.update is update for pending in self._pending.values()):
            update.progress_at = time.monotonic()  # jobs have a deadline of their own
        elif time.monotonic() - update.progress_at > self.stall_s:
            self._ended(f"nothing was heard of it for {self.stall_s:g} s")

    def join_group(self, **group: Any) -> "Future[Any]":
        """Lets every rank join a weight-update group."""
        return self._start(None, "start_join", **group)

    def leave_group(self, name: str) -> bool:
        """Ends a group; whether there was one."""
        return any(self.ranks.run("close_group", name=name))

    def _start(self, update: _Update | None, command: str, /, **arguments: Any) -> "Future[Any]":
        self._job_number += 1
        job = f"job{self._job_number}"
        self._on_ranks(command, job=job, **arguments)
        self._pending[job] = _Pending(Future(), update)
        return self._pending[job].future

    def _end_jobs(self) -> None:
        """Jobs that have ended on this rank end on all: the others do the same with the same peers."""
        for job, pending in list(self._pending.items()):
            if not self.worker.jobs[job].is_done:
                continue
            del self._pending[job]
            try:
                pending.future.set_result(self.ranks.run("end", job=job))
            except RanksError as error:
                if pending.update is not None and pending.update is self._update:
                    self._ended(str(error))
                pending.future.set_exception(error)

    def set_version(self, version: str) -> None:
        """Another name for the weights as they are."""
        self.ranks.run("set_version", version=version)
        self.version = version

    def load_disk(self, path: str, version: str) -> str:
        """The weights of a folder. Refused while the engine generates."""
        if not self.is_paused:
            raise Refused("the engine is generating: pause_generation first")
        if self._update is not None:
            raise Refused("an update is open: commit or abandon it first")
        try:
            (self.version, *_) = self.ranks.run("load_disk", path=path, version=version)
        except RanksError as error:
            found = [text for text in self.ranks.run("abandon", reason=str(error)) if text is not None]
            self.dirty = found[0] if found else self.dirty
            raise
        self.dirty, self.num_updates = None, self.num_updates + 1
        return self.version

    def _on_ranks(self, command: str, /, **arguments: Any) -> list[Any]:
        """A command that begins something: where it fails on one rank, it is undone on the others."""
        try:
            return self.ranks.run(command, **arguments)
        except RanksError as error:
            if len(set(error.errors)) > 1:
                self.ranks.run("abandon", reason=str(error))
            raise

    # Memory and checks

    def release(self, tags: list[str]) -> None:
        """Gives memory of `weights` and `kv_cache` back. Refused while requests are computed."""
        tags = tags or list(TAGS)
        if self._requests:
            raise Refused(f"{len(self._requests)} requests have not ended: abort them first")
        if WEIGHTS in tags and self._update is not None:
            raise Refused("an update is open: commit or abandon it first")
        self.ranks.run("release", tags=tags)
        self.released |= set(tags)
        if WEIGHTS in tags:
            self.dirty = "their memory was released"

    def take_back(self, tags: list[str]) -> None:
        """Takes memory back; twice is harmless. Weights have to be sent anew."""
        tags = tags or list(TAGS)
        self.ranks.run("resume", tags=tags)
        self.released -= set(tags)

    def memory(self) -> list[dict[str, int]]:
        """Bytes of weights and of keys and values, by rank."""
        return self.ranks.run("memory")

    def check_weights(self, action: str) -> Any:
        """See `Worker.do_check` and `Worker.do_checksums`."""
        if action == "checksum":
            merged: dict[str, int] = {}
            for sums in self.ranks.run("checksums"):
                merged |= sums
            return merged
        if action == "reset_tensors" and not self.is_paused:
            raise Refused("the engine is generating: pause_generation first")
        differing = sorted({name for names in self.ranks.run("check", action=action) for name in names})
        if action == "reset_tensors":
            self.dirty = "weights_checker has reset the tensors"
        if differing:
            raise Refused(f"{len(differing)} tensors differ from the snapshot: {', '.join(differing[:5])}")
        return {}


def _pass_on(inner: "Future[Any]", outer: "Future[Any]") -> None:
    error = inner.exception()
    if error is not None:
        outer.set_exception(error)
    else:
        outer.set_result(inner.result())
