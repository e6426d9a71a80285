"""Training and generating in one process by turns: what one phase does not need is given back for the other.

To generate: gradients and 16-bit copies of weights are dropped, the optimizer's state goes to pinned host memory, the
trainer's process groups are parked, the engine takes its memory and gets the weights. To train, the same backwards. The
trainer's own parameters stay. Every rank holds a part of both, and all ranks call everything together.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from equipoise.accelerator.pinned import host_empty_like
from equipoise.checkpoint.tensors import model_tensors
from equipoise.distributed.agree import raise_together
from equipoise.distributed.local import local_part
from equipoise.distributed.parking import Holder, park, unpark
from equipoise.distributed.weight_update import Manifest, Packer, plan_buckets
from equipoise.distributed.world import World
from equipoise.kernels.checksum import new_totals
from equipoise.models.config import ModelConfig
from equipoise.serve.engine import EngineConfig
from equipoise.serve.model import bind_group
from equipoise.serve.regions import EXPERTS, weight_source
from equipoise.serve.request import Finished, Prompt
from equipoise.serve.worker import KV_CACHE, WEIGHTS, Worker


@dataclass(frozen=True)
class PhaseRecord:
    """One change of phase on this rank. allocated, in_use: bytes after it, of this process's tensors and of the device
    (on a CPU both are the process's)."""

    name: str
    seconds: float
    allocated: int
    in_use: int


class HostState:
    """An optimizer's state, moved between the device and (pinned) host memory; the host's is kept for next time."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._homes: dict[int, torch.Tensor] = {}

    def to_host(self) -> int:
        """Returns the bytes that left the device. State that is on the host already stays."""
        moved = 0
        with torch.no_grad():
            for local in self._locals():
                if local.device.type == "cpu":
                    continue
                home = self._homes.get(id(local))
                if home is None or home.shape != local.shape:
                    home = self._homes[id(local)] = host_empty_like(local)
                home.copy_(local, non_blocking=True)
                moved += local.numel() * local.element_size()
        return moved

    def drop_device(self, device: torch.device) -> None:
        """After the copies have ended: the state is now the host's."""
        for local in self._locals():
            if id(local) in self._homes and local.device == device:
                local.data = self._homes[id(local)]

    def to_device(self, device: torch.device) -> None:
        """Brings back what was moved."""
        with torch.no_grad():
            for local in self._locals():
                home = self._homes.get(id(local))
                if home is not None and local.data_ptr() == home.data_ptr():
                    local.data = home.to(device, non_blocking=True)

    def _locals(self) -> Iterator[torch.Tensor]:
        for slots in self.optimizer.state.values():
            for value in slots.values():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    with torch.no_grad():
                        yield local_part(value)


class _UpdatePlan(NamedTuple):
    """How the engine gets the trainer's weights. num_shared: the first buckets, which all ranks fill together. packed:
    the buckets that this rank fills and loads. copied: those whose tensors it copies from one to the other."""

    packer: Packer
    layout: Manifest
    num_shared: int
    packed: list[int]
    copied: list[int]
    tensors: list[str]


class TrainAndGenerate:
    """See the module docstring. Collective.

    Args:
        world: of the trainer.
        model, optimizer: the trainer's.
        holders: every module and mesh that communicates, as for `park`; the model is one already.
        config: of the engine; its experts are split over all ranks.
        dtype: of the engine's weights.
        bucket_bytes: memory for moving weights.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer: Optimizer,
        model_config: ModelConfig,
        config: EngineConfig,
        dtype: torch.dtype,
        *,
        holders: Sequence[Holder] = (),
        bucket_bytes: int = 512 * 2**20,
    ) -> None:
        self.world, self.model, self.optimizer, self.dtype = world, model, optimizer, dtype
        self.holders, self.bucket_bytes = (model, *holders), bucket_bytes
        self.state = HostState(optimizer)
        shared = world.group if world.size > 1 else None
        self.worker = Worker(model_config, config, world.accelerator, dtype, shared, world.timeout_s)
        bind_group(self.worker.model, None)  # the group is parked while the engine works
        self.worker.do_release([WEIGHTS, KV_CACHE])
        self.records: list[PhaseRecord] = []
        self._group: dist.ProcessGroup | None = None
        self._plan: _UpdatePlan | None = None

    @contextlib.contextmanager
    def generating(self, version: str) -> Iterator["TrainAndGenerate"]:
        """Inside, `generate` works and the trainer does not; the engine has the trainer's weights as `version`.

        If the block or the change of phase fails, the trainer is brought back, then the error is raised.
        """
        try:
            self._to_engine(version)
            yield self
        finally:
            self._to_trainer()

    def generate(self, prompts: Sequence[Prompt]) -> list[Finished]:
        """This rank's requests, finished, in their order. Every rank calls it, also without any."""
        engine = self.worker.engine
        for prompt in prompts:
            engine.add(prompt)
        done: dict[str, Finished] = {}
        with self._phase("generate"):
            while self._total(engine.num_running + engine.num_waiting):
                done |= {finished.rid: finished for finished in engine.step()}
                self.world.watch.progress()
        return [done[prompt.rid] for prompt in prompts]

    def _to_engine(self, version: str) -> None:
        world, worker = self.world, self.worker
        with self._phase("offload optimizer"):
            self.optimizer.zero_grad(set_to_none=True)
            self.state.to_host()
            world.accelerator.synchronize()
            self.state.drop_device(world.device)
            copies = getattr(self.model, "copies", None)
            if copies is not None:
                copies.release()  # the next forward makes them again
            world.accelerator.empty_cache()
        with self._phase("park groups"):
            park(world, *self.holders)
            timeout = timedelta(seconds=world.timeout_s)
            self._group = dist.new_group(backend=world.accelerator.world_backend(), timeout=timeout)
            bind_group(worker.model, self._group)
        with self._phase("engine memory"):
            worker.do_resume([WEIGHTS, KV_CACHE])
        with self._phase("update weights"):
            self._update(version)

    def _to_trainer(self) -> None:
        world, worker = self.world, self.worker
        with self._phase("release engine"):
            worker.engine.abort()
            worker.do_release([WEIGHTS, KV_CACHE])
        with self._phase("unpark groups"):
            bind_group(worker.model, None)
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None
            unpark(world)
        with self._phase("reload optimizer"):
            self.state.to_device(world.device)

    def _update(self, version: str) -> None:
        """Straight from tensor to tensor where this rank has both; otherwise bucket by bucket through one buffer."""
        worker, receiver = self.worker, self.worker.receiver
        plan = self._plan = self._plan or self._plan_update()
        plan.packer.refresh()
        manifest = plan.layout.renamed(version)
        error: Exception | None = None
        try:
            receiver.begin(manifest)
            size = max((manifest.buckets[index].num_bytes for index in plan.packed), default=0)
            room = torch.empty(size, dtype=torch.uint8, device=worker.device)
        except Exception as e:
            error = e
        self._together(error)
        totals = new_totals(len(manifest.buckets), worker.device)
        for index in plan.packed:
            plan.packer.pack(index, room, totals[index], everywhere=index < plan.num_shared)
            receiver.load(index, room)
        try:
            parameters = model_tensors(worker.model)
            receiver.copy(plan.copied, ((parameters[name], plan.packer.local(name)) for name in plan.tensors))
            sums = totals.tolist()
            worker.engine.set_version(receiver.commit({index: sums[index] for index in plan.packed}))
        except Exception as e:
            error = e
        self._together(error)

    def _plan_update(self) -> "_UpdatePlan":
        """Of every update. Collective."""
        worker, specs, source = self.worker, self.worker.receiver.specs, weight_source(self.model)
        packer = Packer(source.tensors, source.regions, specs, self._live_group if self.world.size > 1 else None)
        own: list[list[str]] = [[] for _ in range(self.world.size)]
        everywhere: list[str] = []
        for name in specs:
            region, holders = source.regions[name], packer.holders[name]
            home = region.start[0] // worker.num_local_experts if EXPERTS in region.tensor else -1
            is_own = self.world.size == 1 or holders == (home,)
            (own[home if home >= 0 else 0] if is_own else everywhere).append(name)
        parts = [
            plan_buckets(((name, specs[name]) for name in names), self.bucket_bytes) if names else []
            for names in (everywhere, *own)
        ]
        buckets = [bucket for part in parts for bucket in part]
        packer.plan(buckets)
        num_shared = len(parts[0])
        at_home = self._tensors_at_home(packer)
        mine = [i for i in range(num_shared, len(buckets)) if packer.bucket_holders(i) == [self.world.rank]]
        tensors_of = {i: {source.regions[piece.name].tensor for piece in buckets[i].pieces} for i in mine}
        copied = [i for i in mine if tensors_of[i] <= at_home]
        return _UpdatePlan(
            packer,
            Manifest(version="layout", tensors=dict(specs), buckets=buckets),
            num_shared,
            packed=[*range(num_shared), *(i for i in mine if i not in set(copied))],
            copied=copied,
            tensors=sorted(set().union(*(tensors_of[i] for i in copied))),
        )

    def _tensors_at_home(self, packer: Packer) -> set[str]:
        """Tensors of which the trainer's part on this rank is the engine's."""
        worker, found = self.worker, set()
        for name, parameter in model_tensors(worker.model).items():
            first = worker.rank * worker.num_local_experts if EXPERTS in name else 0
            start = (first, *(0 for _ in parameter.shape[1:])) if parameter.dim() else ()
            if packer.local_box(name) == (start, tuple(parameter.shape)):
                found.add(name)
        return found

    def _live_group(self) -> dist.ProcessGroup:
        """Another one in every cycle."""
        assert self._group is not None
        return self._group

    def _together(self, error: Exception | None) -> None:
        if self._group is not None:
            raise_together(error, self._group)
        elif error is not None:
            raise error

    def _total(self, number: int) -> int:
        if self._group is None:
            return number
        total = torch.tensor(number)
        dist.all_reduce(total, group=self._group)
        return int(total)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        accelerator = self.world.accelerator
        started = time.perf_counter()
        try:
            yield
        finally:
            accelerator.synchronize()
            seconds, memory = time.perf_counter() - started, accelerator.memory()
            on_device = accelerator.device_type != "cpu"
            in_use = memory.total - memory.free if on_device else memory.allocated
            self.records.append(PhaseRecord(name, seconds, memory.allocated, in_use))
