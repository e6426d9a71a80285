"""Transport over point-to-point messages of a process group: Gloo, NCCL, MCCL, any backend with isend and irecv.

Weights go straight from the master's row into the slot's row, gradients from the slot into an arrival row at home:
nothing is packed or copied. A message is received only where its host has posted the receive, and a receive into a slot
is posted only when the slot is free, so the order of uses never depends on what the dispatcher does. The placement has
been read on the host; nothing here waits for the device beyond the backend's own waits.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist

from equipoise.balance.replicas import Copies, Masters, Replica, ReplicaBuffers
from equipoise.balance.transport.base import Operation
from equipoise.distributed.collectives import Group, live_group
from equipoise.errors import RankFailure


class PendingMessages:
    """Works of one batch; keeps their tensors alive until the wait, which is an operation of the name `what`."""

    num_parts = 1

    def __init__(self, transport: "CollectiveTransport", ops: list[dist.P2POp], peers: list[int], what: str) -> None:
        self.transport, self.ops, self.peers, self.what = transport, ops, peers, what
        self.works = dist.batch_isend_irecv(ops) if ops else []

    def wait(self, part: int = -1) -> None:
        if not self.works:
            return
        started = time.perf_counter()
        try:
            with self.transport.operation(self.what):  # may say more about the missing ranks
                self._wait()
        except RankFailure:
            raise
        except RuntimeError as error:
            raise RankFailure(str(error)) from error.__cause__
        self.transport.waited_s += time.perf_counter() - started

    def _wait(self) -> None:
        works, self.works = self.works, []
        for index, work in enumerate(works):
            try:
                work.wait()
            except RuntimeError as error:
                # A backend that joins a batch into one work cannot tell its messages apart.
                peers = [self.peers[index]] if len(works) == len(self.peers) else sorted(set(self.peers))
                raise RuntimeError(
                    f"{self.what}: rank {dist.get_rank()} waited for rank {', '.join(map(str, peers))}, which did not "
                    f"take part: {str(error).splitlines()[0]}"
                ) from error
        self.ops = []


class CollectiveTransport:
    """See the module docstring. `group` is any process group with isend and irecv, or a mesh of one axis; `buffers`
    this rank's slots."""

    def __init__(self, group: Group | None, buffers: ReplicaBuffers) -> None:
        self._group, self.buffers = group, buffers
        self.operation: Operation = lambda name: nullcontext()
        self.waited_s = 0.0
        self.rank = 0 if group is None else dist.get_rank(live_group(group))
        self.global_ranks = [0] if group is None else dist.get_process_group_ranks(live_group(group))
        # A tag for each name and direction: a late gradient is never taken for a weight.
        self.tags = {name: 2 * index for index, name in enumerate(buffers.shapes)}

    def post(self, messages: list[tuple[bool, torch.Tensor, int]], tag: int, what: str) -> PendingMessages:
        """Starts messages (is it a send, tensor, peer in the group) together."""
        peers = [self.global_ranks[peer] for _, _, peer in messages]
        group = None if self._group is None else live_group(self._group)
        ops = [
            dist.P2POp(dist.isend if is_send else dist.irecv, tensor, peer, group, tag)
            for (is_send, tensor, _), peer in zip(messages, peers)
        ]
        return PendingMessages(self, ops, peers, what)

    def prepare(self, name: str, device: torch.device, wants_gradients: bool) -> None:
        if self.buffers.device is None:
            self.buffers.device = device

    def check(self) -> None:
        """Failed messages raise where they are waited for."""

    def push_weights(self, name: str, copies: Copies, masters: Masters, what: str) -> PendingMessages:
        slots = self.buffers.weights(name)
        messages: list[tuple[bool, torch.Tensor, int]] = []
        for replica in copies.replicas:
            if replica.home == self.rank:
                messages.append((True, masters[replica.local].contiguous(), replica.host))
            if replica.host == self.rank:
                messages.append((False, slots[replica.slot], replica.home))
        return self.post(messages, self.tags[name], what)

    def pull_gradients(
        self, name: str, copies: Copies, gradients: Sequence[torch.Tensor], what: str
    ) -> "CollectivePull":
        return CollectivePull(self, name, copies.replicas, what)


class CollectivePull:
    """Gradients come home in rounds of as many per home as it has arrival rows; the first round starts at once."""

    added_to: Sequence[torch.Tensor] | None = None

    def __init__(self, transport: CollectiveTransport, name: str, replicas: Sequence[Replica], what: str) -> None:
        self.transport, self.name, self.what = transport, name, what
        self.held: dict[int, torch.Tensor] = {}
        rows = transport.buffers.reduction_rows
        self.rounds: list[list[tuple[int, Replica]]] = []
        arrived: dict[int, int] = {}
        for replica in replicas:
            position = arrived.get(replica.home, 0)
            arrived[replica.home] = position + 1
            number, row = divmod(position, rows)
            if number == len(self.rounds):
                self.rounds.append([])
            self.rounds[number].append((row, replica))
        self.pending = self._start(0) if self.rounds else None
        self.done = not self.rounds

    def _start(self, number: int) -> PendingMessages:
        rank, buffers = self.transport.rank, self.transport.buffers
        gradients, arrivals = buffers.gradients(self.name), buffers.arrivals(self.name)
        messages: list[tuple[bool, torch.Tensor, int]] = []
        for row, replica in self.rounds[number]:
            if replica.host == rank:
                messages.append((True, gradients[replica.slot], replica.home))
            if replica.home == rank:
                messages.append((False, arrivals[row], replica.host))
        return self.transport.post(messages, self.transport.tags[self.name] + 1, self.what)

    def _run(self, add: Callable[[int, torch.Tensor], None]) -> None:
        if self.done:
            return
        arrivals = self.transport.buffers.arrivals(self.name)
        for number, messages in enumerate(self.rounds):
            assert self.pending is not None
            self.pending.wait()
            for row, replica in messages:
                if replica.home == self.transport.rank:
                    add(replica.local, arrivals[row])
            self.pending = self._start(number + 1) if number + 1 < len(self.rounds) else None
        self.done = True

    def _hold(self, local: int, gradient: torch.Tensor) -> None:
        if local in self.held:
            self.held[local] += gradient
        else:
            self.held[local] = gradient.clone()

    def finish(self, add: Callable[[int, torch.Tensor], None]) -> None:
        self._run(add)
        held, self.held = self.held, {}
        for local, gradient in held.items():
            add(local, gradient)

    def force(self) -> None:
        self._run(self._hold)
