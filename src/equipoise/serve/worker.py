"""One engine process: its share of the model, and what rank 0 can have it do. Commands and results are JSON."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from equipoise.accelerator import Accelerator
from equipoise.checkpoint.tensors import checksums
from equipoise.distributed.watch import describe
from equipoise.distributed.weight_update import (
    Intake,
    Manifest,
    Offer,
    Target,
    TensorSpec,
    UpdateGroup,
    WeightReceiver,
)
from equipoise.distributed.weight_update.group import reach_store
from equipoise.errors import EquipoiseError, WeightUpdateError
from equipoise.models.config import ModelConfig
from equipoise.serve.engine import Engine, EngineConfig
from equipoise.serve.model import build_engine_model
from equipoise.serve.regions import engine_tensors
from equipoise.serve.request import Prompt

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)
UNKNOWN_LAYOUT = "send the whole manifest"


class Job:
    """Work in a thread of its own: waits for other processes, so nobody else may wait for it."""

    def __init__(self, run: Callable[[Callable[[], bool]], Any]) -> None:
        self._stopped = threading.Event()
        self.result: Any = None
        self.error: str | None = None
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self, run: Callable[[Callable[[], bool]], Any]) -> None:
        try:
            self.result = run(self._stopped.is_set)
        except EquipoiseError as error:
            self.error = str(error)
        except Exception as error:
            self.error = describe(error)

    def stop(self) -> None:
        """Asks it to give up."""
        self._stopped.set()

    def join(self, seconds: float) -> bool:
        """Whether it has ended within that time."""
        self._thread.join(seconds)
        return self.is_done


class Worker:
    """Every rank has one; `execute` is what `Ranks` calls. Methods named do_... are the commands."""

    def __init__(
        self,
        model_config: ModelConfig,
        config: EngineConfig,
        accelerator: Accelerator,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        deadline_s: float = 300.0,
    ) -> None:
        self.accelerator, self.deadline_s = accelerator, deadline_s
        self.rank = 0 if group is None else dist.get_rank(group)
        self.num_ranks = 1 if group is None else group.size()
        self.device = accelerator.device()
        self.model = build_engine_model(model_config, self.device, dtype, group)
        self.num_local_experts = model_config.num_experts // self.num_ranks
        self.engine = Engine(self.model, config)
        self.receiver = WeightReceiver(*self._tensors())
        self.intake = Intake(self.receiver, accelerator, self.device, deadline_s)
        self.receiver.dirty = "no weights have been loaded"
        self.groups: dict[str, UpdateGroup] = {}
        self.jobs: dict[str, Job] = {}
        self.released: set[str] = set()
        self._snapshot: dict[str, torch.Tensor] | None = None

    def _tensors(self) -> tuple[dict[str, TensorSpec], dict[str, Target]]:
        return engine_tensors(self.model, self.rank * self.num_local_experts, self.model.config.num_experts)

    def execute(self, name: str, arguments: dict[str, Any]) -> Any:
        """Runs a command; its result is JSON."""
        return getattr(self, f"do_{name}")(**arguments)

    # Generation

    def do_add(self, add: list[list[dict[str, Any]]]) -> None:
        """New requests of each rank."""
        for prompt in add[self.rank] if add else ():
            self.engine.add(Prompt(**prompt))

    def do_step(self, add: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """New requests, then one step. Returns what has finished here."""
        self.do_add(add)
        return [finished.model_dump(mode="json") for finished in self.engine.step()]

    def do_loads(self) -> list[int]:
        """Running and waiting requests here."""
        return [self.engine.num_running, self.engine.num_waiting]

    def do_abort(self, rids: list[str] | None) -> list[dict[str, Any]]:
        """Ends requests, None: all; returns those that were here."""
        return [f.model_dump(mode="json") for f in self.engine.abort(None if rids is None else set(rids))]

    def do_retract(self) -> None:
        self.engine.retract()

    def do_flush(self) -> None:
        self.engine.flush()

    def do_nothing(self) -> None:
        """A sign of life."""

    # Weight updates

    def do_begin(self, manifest: dict[str, Any] | None, version: str, digest: str) -> None:
        """Opens an update by its manifest, or by the digest of one that was sent before."""
        if WEIGHTS in self.released:
            raise WeightUpdateError("the weights' memory is released: resume it first")
        if manifest is not None:
            self.receiver.begin(Manifest.parse(manifest))
            return
        known = self.receiver.knows(digest)
        if known is None:
            raise WeightUpdateError(f"there is no layout {digest!r}: {UNKNOWN_LAYOUT}")
        self.receiver.begin(known.renamed(version))

    def do_commit(self, sums: list[list[int]]) -> str:
        if self.jobs:
            raise WeightUpdateError("buckets are still arriving")
        version = self.receiver.commit({int(index): int(value) for index, value in sums})
        self.engine.set_version(version)
        return version

    def do_abandon(self, reason: str) -> str | None:
        """Gives up an open update and what is arriving; returns why the weights are dirty, if they are."""
        for job in self.jobs.values():
            job.stop()
        for name, job in list(self.jobs.items()):
            if not job.join(2.0):  # a broadcast that never comes: its group has to go
                self.do_close_groups()
                job.join(2.0)
            del self.jobs[name]
        self.receiver.abandon(reason)
        if self.receiver.dirty:
            self.engine.forget()
        return self.receiver.dirty

    def do_start_join(self, job: str, address: str, port: int, offset: int, size: int, name: str, backend: str) -> None:
        """Starts to join a weight-update group."""
        if name in self.groups:
            raise WeightUpdateError(f"there is a weight-update group {name!r} already: destroy it first")

        def run(stopped: Callable[[], bool]) -> None:
            if self.device.type != "cpu":
                self.accelerator.set_device(self.device.index or 0)
            store = reach_store(address, port, min(self.deadline_s, 60.0))
            rank = offset + self.rank
            group = UpdateGroup(self.accelerator, name, store, rank, size, self.deadline_s, backend)
            if stopped():
                group.close(abort=True)
            else:
                self.groups[name] = group

        self.jobs[job] = Job(run)

    def do_start_receive(self, job: str, group: str, indices: list[int]) -> None:
        """Starts to receive buckets through a group."""
        if group not in self.groups:
            raise WeightUpdateError(f"there is no weight-update group {group!r}: join it first")
        joined = self.groups[group]
        self.jobs[job] = Job(lambda stopped: self.intake.take_broadcasts(joined, indices, stopped))

    def do_start_load(self, job: str, offers: list[dict[str, Any]]) -> None:
        """Starts to take buckets from memory of this machine; an offer for each rank."""
        offer = Offer.parse(offers[self.rank])
        self.jobs[job] = Job(lambda stopped: self.intake.take_shared(offer, stopped))

    def do_end(self, job: str) -> Any:
        """Waits for what was started; returns its result, raises its error."""
        running = self.jobs[job]
        ended = running.join(self.deadline_s)
        if not ended:
            running.stop()
        del self.jobs[job]
        if not ended:
            raise WeightUpdateError(f"nothing came of it within {self.deadline_s:g} s")
        if running.error is not None:
            raise WeightUpdateError(running.error)
        return running.result

    def do_close_group(self, name: str) -> bool:
        """Ends a group; whether there was one."""
        group = self.groups.pop(name, None)
        if group is not None:
            group.close(abort=True)
        return group is not None

    def do_close_groups(self) -> None:
        for name in list(self.groups):
            self.do_close_group(name)

    def do_set_version(self, version: str) -> None:
        """Another name for the same weights."""
        self.engine.version = version

    # Memory

    def do_release(self, tags: list[str]) -> None:
        """Gives memory back; what it held is lost."""
        if KV_CACHE in tags:
            self.engine.forget()
            self.engine.cache.release()
        if WEIGHTS in tags:
            for parameter in self.model.parameters():
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            self.receiver.give_up_memory("the weights' memory was released")
        self.released |= set(tags)
        self.accelerator.empty_cache()

    def do_resume(self, tags: list[str]) -> None:
        """Takes memory back. Weights have to be sent anew."""
        if KV_CACHE in tags:
            self.engine.cache.allocate()
        if WEIGHTS in tags and WEIGHTS in self.released:
            for parameter, shape in zip(self.model.parameters(), self._shapes()):
                parameter.data = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            self.receiver.take_memory(self._tensors()[1])
        self.released -= set(tags)

    def _shapes(self) -> list[torch.Size]:
        with torch.device("meta"):
            like = build_engine_model(self.model.config, torch.device("meta"), torch.float32)
        shapes = []
        for name, parameter in like.named_parameters():
            shape = parameter.shape
            shapes.append(torch.Size((self.num_local_experts, *shape[1:])) if ".experts." in name else shape)
        return shapes

    def do_memory(self) -> dict[str, int]:
        """Bytes of weights and of keys and values here."""
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return {WEIGHTS: weights, KV_CACHE: self.engine.cache.num_bytes}

    # Checks

    def _views(self) -> dict[str, torch.Tensor]:
        """This rank's tensors by their names in a checkpoint."""
        specs, views = self.receiver.specs, {}
        for name, (flat, start) in self.receiver.targets.items():
            shape = specs[name].shape
            views[name] = flat[start : start + specs[name].num_rows * specs[name].row_numel].view(shape)
        return views

    def do_checksums(self) -> dict[str, int]:
        """Of every tensor here."""
        views = self._views()
        return dict(zip(views, checksums(views.values()).tolist()))

    def do_check(self, action: str) -> list[str]:
        """`snapshot` copies the weights to the host, `reset_tensors` scrambles them (the engine is dirty then),
        `compare` names the tensors that differ from the snapshot."""
        views = self._views()
        if action == "snapshot":
            self._snapshot = {name: view.cpu().clone() for name, view in views.items()}
        elif action == "reset_tensors":
            for flat in {id(t.flat): t.flat for t in self.receiver.targets.values()}.values():
                flat.zero_().sub_(1)
            self.receiver.dirty = "weights_checker has reset the tensors"
            self.engine.forget()
        elif self._snapshot is None:
            raise WeightUpdateError("there is no snapshot to compare with: take one first")
        else:
            return [n for n, view in views.items() if not _same_bytes(view.cpu(), self._snapshot[n])]
        return []

    def do_load_disk(self, path: str, version: str) -> str:
        """The weights of a folder of safetensors."""
        from equipoise.serve.disk import load_folder

        load_folder(Path(path), self.receiver, version)
        self.engine.set_version(version)
        return version

    def close(self) -> None:
        """Ends groups and jobs."""
        for job in self.jobs.values():
            job.stop()
        self.do_close_groups()
        for job in self.jobs.values():
            job.join(5.0)  # a thread inside of a backend must not meet the end of the interpreter


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
