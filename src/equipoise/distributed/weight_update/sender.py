"""The trainer's side of an update: what the colocated and the distributed path share.

Every rank of the trainer makes the same calls. Rank 0 talks to the engines; an error on one rank, or of one engine, is
raised on all within the deadline, and the engines are told to give up. The next update starts afresh.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import torch
from torch import distributed as dist

from equipoise.accelerator import Accelerator
from equipoise.distributed.agree import gather_json, raise_together
from equipoise.distributed.weight_update.client import EngineClient, EngineInfo
from equipoise.distributed.weight_update.manifest import Manifest, TensorSpec, plan_buckets, raise_for, spec_of
from equipoise.distributed.weight_update.packer import Packer, Region
from equipoise.distributed.weight_update.phases import Phases, UpdateReport
from equipoise.distributed.weight_update.polling import rest
from equipoise.errors import WeightUpdateError
from equipoise.kernels.checksum import new_totals

BUCKET_BYTES = 512 * 2**20
DEADLINE_S = 300.0


class WeightSource(NamedTuple):
    """What is sent, from one converter for every path.

    tensors: gives the trainer's live tensors by its own names. regions: for each name of a Hugging Face checkpoint,
    where in them it is. dtype: of the wire, for engines that do not say theirs; None: the tensors' own.
    """

    tensors: Callable[[], Mapping[str, torch.Tensor]]
    regions: Mapping[str, Region]
    dtype: torch.dtype | None = None


class WeightUpdate(ABC):
    """Updates of one or several engines from one trainer. Buffers, and groups, are kept between updates."""

    def __init__(
        self,
        source: WeightSource,
        clients: Sequence[EngineClient],
        accelerator: Accelerator,
        *,
        group: Callable[[], dist.ProcessGroup] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """
        Args:
            source: what is sent.
            clients: the engines; used on rank 0, the same number on every rank.
            accelerator: of the trainer.
            group: gives the group of the trainer's ranks, anew after parking; None for one rank.
            bucket_bytes: bytes that are moved at a time; two buckets are held.
            deadline_s: longest wait without progress, and for each call of an engine.
        """
        self.source, self.clients, self.accelerator = source, clients, accelerator
        self.bucket_bytes, self.deadline_s = bucket_bytes, deadline_s
        self.device = accelerator.device()
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group())
        self.num_ranks = 1 if group is None else group().size()
        self.infos: list[EngineInfo] = []
        self._calls = ThreadPoolExecutor(max_workers=32, thread_name_prefix="weight-update")
        self._specs: dict[str, TensorSpec] = {}
        self._packer: Packer | None = None
        self._manifest: Manifest | None = None
        self._totals: torch.Tensor | None = None
        self.layout = clients[0].layout
        if any(client.layout != self.layout for client in clients):
            raise WeightUpdateError(
                "the engines of one update are of different kinds and take their bytes differently: make one update "
                "for each kind"
            )

    @property
    def packer(self) -> Packer:
        assert self._packer is not None
        return self._packer

    def update(self, version: str) -> UpdateReport:
        """Sends every tensor, under one version that the engines show when all of it has arrived.

        Raises:
            WeightUpdateError: on every rank. Engines to which nothing was written keep the old version in service,
                others refuse to generate until an update succeeds.
        """
        started = time.perf_counter()
        phases = Phases(self.accelerator)
        try:
            self._prepare()
            with phases.host("pause"):
                self._on_rank_0(lambda client: client.pause(), meanwhile=self.packer.refresh)
            assert self._manifest is not None
            self._totals = None
            manifest = self._manifest.renamed(version)
            with phases.host("begin"):
                self._on_rank_0(lambda client: client.begin(manifest))
            sums = self._move(manifest, phases)
            phases.finish()
            with phases.host("commit"):
                checksums = self._all_checksums(sums)
                self._on_rank_0(lambda client: client.commit(manifest, checksums))
        except BaseException as error:
            self._give_up(error)
            raise
        with phases.host("resume"):
            self._on_rank_0(lambda client: client.resume())
        return UpdateReport(
            version,
            manifest.num_bytes,
            len(manifest.buckets),
            time.perf_counter() - started,
            phases.finish(),
            phases.engine,
            self.extra_bytes,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives buffers and groups back. Twice is harmless."""
        self._release()
        self._calls.shutdown(wait=False, cancel_futures=True)

    @property
    @abstractmethod
    def extra_bytes(self) -> int:
        """Memory of this rank's buffers."""

    @abstractmethod
    def _order(self) -> list[list[str]]:
        """Names in the order in which they are sent, in lists between which a bucket ends."""

    @abstractmethod
    def _plan(self) -> None:
        """What follows from the packer's buckets alone, once for each layout."""

    @abstractmethod
    def _connect(self) -> None:
        """Buffers and groups, before the first update and after one that failed. Collective."""

    @abstractmethod
    def _move(self, manifest: Manifest, phases: Phases) -> dict[int, torch.Tensor]:
        """Brings every bucket into the engines; returns checksums of those that this rank has filled. Collective."""

    @abstractmethod
    def _release(self) -> None:
        """Undoes `_connect`, without waiting for anybody."""

    def _prepare(self) -> None:
        if self._packer is None:
            self.infos = self._ask_engines()
            self._specs = self._decide_specs()
            self._packer = Packer(self.source.tensors, self.source.regions, self._specs, self._group)
            layout = self.layout
            buckets = [
                bucket
                for names in self._order()
                for bucket in plan_buckets(
                    ((name, self._specs[name]) for name in self._fitting(names)),
                    self.bucket_bytes,
                    alignment=layout.alignment,
                    split=layout.split,
                )
            ]
            self._packer.plan(buckets, layout.one_sender)
            self._manifest = Manifest(version="layout", tensors=self._specs, buckets=buckets)
            self._plan()
        self._connect()

    def _fitting(self, names: list[str]) -> list[str]:
        """Without room between tensors, wide elements come first, so that all are aligned."""
        if self.layout.alignment > 1:
            return names
        return sorted(names, key=lambda name: -self._specs[name].torch_dtype.itemsize)

    def _ask_engines(self) -> list[EngineInfo]:
        """On every rank, what the engines say to rank 0."""
        found: list[Any] = []

        def ask() -> None:
            for client in self.clients if self.rank == 0 else ():
                info = client.describe()
                found.append([info.num_ranks, info.version, info.tensors, list(info.experts)])

        self._together(ask)
        found = self._gather(found)[0]
        infos = []
        for num_ranks, version, tensors, experts in found:
            specs = None if tensors is None else {n: TensorSpec(tuple(s), d) for n, (s, d) in tensors.items()}
            infos.append(EngineInfo(num_ranks, version, specs, [tuple(pair) for pair in experts]))
        return infos

    def _decide_specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype on the wire. Raises WeightUpdateError where an engine has other tensors than the trainer."""
        tensors, regions = self.source.tensors(), self.source.regions
        own = {}
        for name, region in regions.items():
            whole = tensors[region.tensor]
            dtype = self.source.dtype if whole.is_floating_point() and self.source.dtype else whole.dtype
            own[name] = TensorSpec(region.shape, spec_of(whole, dtype).dtype)
        told = [info.tensors for info in self.infos if info.tensors is not None]
        if not told:
            return own
        problems = [f"{name!r} is not a tensor of the engine" for name in own if name not in told[0]]
        problems += [f"{name!r} of the engine is none of the trainer's" for name in told[0] if name not in own]
        for name in told[0].keys() & own.keys():
            if told[0][name].shape != own[name].shape:
                problems.append(
                    f"{name!r} has shape {list(own[name].shape)}, the engine's has {list(told[0][name].shape)}"
                )
        raise_for(problems)
        if any(tensors != told[0] for tensors in told[1:]):
            raise WeightUpdateError("the engines have different tensors or dtypes: make one update for each kind")
        return {name: told[0][name] for name in own}

    def _all_checksums(self, sums: Mapping[int, torch.Tensor]) -> dict[int, int]:
        values = torch.stack(list(sums.values())).tolist() if sums else []
        mine = [[index, value] for index, value in zip(sums, values)]
        return {index: value for rank in self._gather(mine) for index, value in rank}

    def _fill(self, index: int, out: torch.Tensor, phases: Phases, *, everywhere: bool = False) -> torch.Tensor:
        """Packs a bucket; returns its checksum, not waited for."""
        if self._totals is None:
            self._totals = new_totals(len(self.packer.buckets), self.device)
        total = self._totals[index]
        wanted = total if self.layout.checks else None
        self.packer.pack(index, out, wanted, everywhere=everywhere, phase=phases.device)
        return total

    def _call(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
        """An engine's call that goes on while buckets are filled."""
        return self._calls.submit(fn, *args)

    def _wait(self, ready: Callable[[], bool], calls: Iterable["Future[Any]"], what: str) -> None:
        """Polls until ready. Raises when an engine's call has failed, or at the deadline."""
        calls, started = list(calls), time.monotonic()
        while not ready():
            for call in calls:
                if call.done():
                    call.result()  # raises its error
            if time.monotonic() > started + self.deadline_s:
                raise WeightUpdateError(f"{what}: nothing happened for {self.deadline_s:g} s")
            rest(started, self.device)

    def _finish_calls(self, calls: Iterable["Future[Any]"]) -> list[Any]:
        """Their results, in order."""
        found = []
        for call in calls:
            try:
                found.append(call.result(self.deadline_s))
            except TimeoutError:
                raise WeightUpdateError(f"an engine gave no answer for {self.deadline_s:g} s") from None
        return found

    def _on_rank_0(self, act: Callable[[EngineClient], Any], meanwhile: Callable[[], None] | None = None) -> None:
        """For every engine at once, on rank 0; an error is raised on every rank. `meanwhile`: on every rank."""

        def run() -> None:
            calls = [self._call(act, client) for client in self.clients] if self.rank == 0 else []
            if meanwhile is not None:
                meanwhile()
            self._finish_calls(calls)

        self._together(run)

    def _together(self, act: Callable[[], Any]) -> None:
        error: BaseException | None = None
        try:
            act()
        except Exception as e:
            error = e
        if self._group is not None:
            raise_together(error, self._group())
        elif error is not None:
            raise error

    def _gather(self, value: Any) -> list[Any]:
        return [value] if self._group is None else gather_json(value, self._group())

    def _give_up(self, error: BaseException) -> None:
        """Tells the engines; those that are as they were go on generating."""
        self._release()
        self._packer = None
        if self.rank != 0:
            return
        reason = f"{type(error).__name__}: {error}"[:500]

        def tell(client: EngineClient) -> None:
            client.abandon(reason)
            client.resume()

        told = [self._call(tell, client) for client in self.clients]
        limit = time.monotonic() + min(self.deadline_s, 10.0)
        for call in told:
            try:
                call.result(max(0.1, limit - time.monotonic()))
            except (Exception, TimeoutError):  # dead, or dirty and says so: the update's own error is what counts
                continue
