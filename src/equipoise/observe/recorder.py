"""Records the loads of a training run's steps, and hands them to a thread that writes the trace.

On a step that is not recorded nothing happens. On a recorded one every MoE layer has an observer: it keeps the counts
that the router and the dispatcher have made anyway, and marks the time of each phase in the device's stream. After the
step the ranks of an EP group exchange these numbers, and the first of them copies them to the host without waiting.

Shapes: N microbatches, L MoE layers, P ranks of the EP group, E experts, M masters and R slots per rank, F phases,
B sequences, K experts per token.
"""

import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from equipoise.accelerator import Accelerator, Event
from equipoise.accelerator.pinned import host_empty_like
from equipoise.distributed.collectives import Group, live_group
from equipoise.errors import TraceError
from equipoise.moe.layer import MoELayer
from equipoise.moe.router import Routing
from equipoise.observe.config import TraceConfig
from equipoise.observe.schema import PHASES, TraceInfo
from equipoise.observe.tables import LayerRows
from equipoise.observe.writer import TraceWriter

if TYPE_CHECKING:
    from equipoise.balance import Placement

logger = logging.getLogger(__name__)

MAX_WAITING = 8
"""Recorded steps that wait for the writing thread; a run whose disk is slower than that waits for it."""


def _in_backward() -> bool:
    """Whether autograd is running: a forward is then a recompute, which counts nothing again."""
    return torch._C._current_graph_task_id() != -1


@dataclass
class _LayerRecord:
    """One layer's forwards of a step, by microbatch. ids: a router's choice and its number of sequences."""

    counts_E: list[torch.Tensor] = field(default_factory=list)
    counts_m: list[torch.Tensor] = field(default_factory=list)
    ids_TK: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    placements: "list[Placement | None]" = field(default_factory=list)
    spans: list[dict[str, tuple[Event, Event]]] = field(default_factory=list)


class _LayerObserver:
    """Sees one layer's forwards; see `moe.layer.LayerObserver`."""

    def __init__(self, accelerator: Accelerator, with_sequences: bool) -> None:
        self.record = _LayerRecord()
        self._accelerator, self._with_sequences = accelerator, with_sequences
        self._open: dict[str, tuple[Event, Event]] = {}

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if _in_backward() else self._span(name)

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start, end = self._accelerator.event(timing=True), self._accelerator.event(timing=True)
        start.record()
        yield
        end.record()
        self._open[name] = start, end

    def finish(
        self, routing: Routing, num_sequences: int, counts_m: torch.Tensor, placement: "Placement | None"
    ) -> None:
        if _in_backward():
            return
        record = self.record  # tensors are kept as they are: under recompute, an operator here would be missed later
        record.counts_E.append(routing.counts_E)
        record.counts_m.append(counts_m)
        record.placements.append(placement)
        record.spans.append(self._open)
        self._open = {}
        if self._with_sequences:
            record.ids_TK.append((routing.ids_TK, num_sequences))


def _by_sequence(ids_TK: torch.Tensor, num_sequences: int, num_experts: int) -> torch.Tensor:
    """int32 [B, E]: rows of each sequence for each expert; ids of -1 count nowhere."""
    ids = ids_TK.reshape(num_sequences, -1).long()
    counts = torch.zeros(num_sequences, num_experts + 1, dtype=torch.int32, device=ids.device)
    ones = torch.ones((), dtype=torch.int32, device=ids.device).expand_as(ids)
    return counts.scatter_add_(1, torch.where(ids < 0, num_experts, ids), ones)[:, :-1]


@dataclass(frozen=True)
class _Copied:
    """Tensors on their way to the host; `wait` returns them there."""

    tensors: list[torch.Tensor]
    done: Event | None

    def wait(self) -> list[torch.Tensor]:
        if self.done is not None:
            self.done.synchronize()
        return self.tensors


@dataclass(frozen=True)
class _StepRecord:
    """What the writing thread gets of one step. `gathered`: one tensor [P, payload]; `own`: plans and sequences."""

    step: int
    num_microbatches: int
    gathered: _Copied | None
    own: _Copied
    has_plans: bool
    has_sequences: bool


class LoadRecorder:
    """Records steps of one rank. All ranks of an EP group make the same calls.

    Args:
        config: which steps.
        info: sizes of the trace.
        layers: the model's MoE layers in order.
        directory: the trace's folder.
        accelerator, device: of this rank.
        ep_group: the ranks that share one set of experts; None for one rank.
        rank: of this process in the world, of which EP groups are consecutive parts.
        expert_bytes: of one expert's weights.

    A folder that can no longer be written ends the recording with one message in the log, and not the run.
    """

    def __init__(
        self,
        config: TraceConfig,
        info: TraceInfo,
        layers: Sequence[MoELayer],
        directory: Path,
        accelerator: Accelerator,
        device: torch.device,
        ep_group: Group | None = None,
        rank: int = 0,
        expert_bytes: int = 0,
    ) -> None:
        self.config, self.info, self.layers = config, info, list(layers)
        self._accelerator, self._device, self._ep_group = accelerator, device, ep_group
        self._group, self._ep_rank = divmod(rank, info.ep_size)
        self._expert_bytes = expert_bytes
        self._observers: list[_LayerObserver] = []
        self._step = 0
        self._queue: queue.Queue[_StepRecord | None] = queue.Queue(MAX_WAITING)
        self._writer = TraceWriter(directory, info, name=f"{rank:05d}")
        self._failed = False
        self._thread = threading.Thread(target=self._write_all, name="load trace", daemon=True)
        self._thread.start()

    def begin(self, step: int) -> bool:
        """Before the forwards of a step; whether it is recorded."""
        self.cancel()
        if step % self.config.every:
            return False
        self._step = step
        with_sequences = self._is_due(self.config.sequences_every)
        self._observers = [_LayerObserver(self._accelerator, with_sequences) for _ in self.layers]
        for layer, observer in zip(self.layers, self._observers):
            layer.observer = observer
        return True

    def cancel(self) -> None:
        """Drops what was seen of the step."""
        for layer in self.layers:
            layer.observer = None
        self._observers = []

    def end(self) -> None:
        """After a step, when the device has done its forwards. Collective over the EP group on recorded steps."""
        records = [observer.record for observer in self._observers]
        self.cancel()
        if not records or not records[0].counts_E:
            return
        number = len(records[0].counts_E)
        assert all(len(r.counts_E) == number for r in records), "every layer runs once for each microbatch"
        gathered_Px = self._exchange(records)
        is_first = self._ep_rank == 0
        own = []
        has_plans = is_first and self.info.num_slots > 0
        if has_plans:
            own = [
                torch.stack([p.slot_expert for r in records for p in r.placements if p is not None]),
                torch.stack([p.quota for r in records for p in r.placements if p is not None]),
            ]
        has_sequences = bool(records[0].ids_TK)
        if has_sequences:
            own += [torch.stack([_by_sequence(*x, self.info.num_experts) for x in r.ids_TK]) for r in records]
        if is_first or has_sequences:
            gathered = self._to_host([gathered_Px]) if is_first else None
            record = _StepRecord(self._step, number, gathered, self._to_host(own), has_plans, has_sequences)
            self._queue.put(record)

    def _is_due(self, every: int) -> bool:
        return every > 0 and self._step % every == 0

    def _exchange(self, records: list[_LayerRecord]) -> torch.Tensor:
        """int32 [P, N * L * (E + M + R + F)]: counts by the routers, counts that arrived, and times as bits."""
        seconds = [
            (span[name][0].elapsed_ms(span[name][1]) / 1e3 if name in span else 0.0)
            for record in records
            for span in record.spans
            for name in PHASES
        ]
        bits = torch.tensor(seconds, dtype=torch.float32).view(torch.int32)
        counts = torch.stack([c for r in records for c in r.counts_E]).flatten().int()
        arrived = torch.stack([c for r in records for c in r.counts_m]).flatten().int()
        mine = torch.cat([counts, arrived, bits.to(self._device, non_blocking=True)])
        if self.info.ep_size == 1:
            return mine[None]
        gathered_Px = mine.new_empty(self.info.ep_size, mine.shape[0])
        assert self._ep_group is not None
        dist.all_gather_into_tensor(gathered_Px.view(-1), mine, group=live_group(self._ep_group))
        return gathered_Px

    def _to_host(self, tensors: list[torch.Tensor]) -> _Copied:
        """Starts copies to pinned memory, where the device is one of its own."""
        if all(t.device.type == "cpu" for t in tensors):
            return _Copied(tensors, None)
        copies = []
        for tensor in tensors:
            if tensor.device.type == "cpu":
                copies.append(tensor)
                continue
            copies.append(host_empty_like(tensor).copy_(tensor, non_blocking=True))
        done = self._accelerator.event()
        done.record()
        return _Copied(copies, done)

    def flush(self) -> None:
        """Lets the thread write what it has got so far; does not wait for it."""
        self._queue.put(None)

    def wait(self) -> None:
        """Returns when the thread has written or kept all that it was given."""
        self._queue.join()

    def close(self) -> None:
        """Writes the rest and ends the thread; harmless when repeated."""
        if self._thread.is_alive():
            self.cancel()
            self._queue.put(_END)
            self._thread.join()

    # The writing thread.

    def _write_all(self) -> None:
        while True:
            record = self._queue.get()
            self._guarded(None if record is _END else record)
            self._queue.task_done()
            if record is _END:
                return

    def _guarded(self, record: "_StepRecord | None") -> None:
        if self._failed:
            return
        try:
            if record is None:
                self._writer.flush()
            else:
                self._write(record)
        except (TraceError, RuntimeError) as error:
            self._failed = True
            logger.error("the load trace ends here, the run goes on: %s", error)

    def _write(self, record: _StepRecord) -> None:
        info, N, L = self.info, record.num_microbatches, len(self.layers)
        own = record.own.wait()
        if record.gathered is not None:
            gathered_Px = record.gathered.wait()[0]
            widths = [info.num_experts, info.num_physical_local, len(PHASES)]
            parts = gathered_Px.split([L * N * width for width in widths], 1)
            counts, arrived, bits = (p.reshape(-1, L, N, w).permute(2, 1, 0, 3) for p, w in zip(parts, widths))
            seconds = bits.contiguous().view(torch.float32).numpy()
            slots = quotas = None
            if record.has_plans:
                slots, quotas = (t.view(L, N, -1).transpose(0, 1).numpy() for t in own[:2])
            has_matrices = self.config.matrices_every > 0 and record.step % self.config.matrices_every == 0
            for number in range(N):
                rows = LayerRows(
                    record.step,
                    number,
                    self._group,
                    counts[number].numpy(),
                    arrived[number].numpy(),
                    None if slots is None else slots[number],
                    None if quotas is None else quotas[number],
                    seconds[number],
                    self._expert_bytes,
                    has_matrices,
                )
                self._writer.write_layers(rows)
        if record.has_sequences:
            counts_LNBE = torch.stack(own[2:] if record.has_plans else own)
            for number in range(N):
                counts = counts_LNBE[:, number].numpy()
                self._writer.write_sequences(record.step, number, self._group, self._ep_rank, counts)


_END = _StepRecord(-1, 0, None, _Copied([], None), False, False)
