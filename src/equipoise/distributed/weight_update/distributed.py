"""Updates of engines anywhere, by broadcasts in groups of a trainer rank and the engines' ranks.

Every trainer rank that owns buckets has a group of its own, so several send at once. The engines take each group in a
thread of its own: no order of senders can make two of them wait for each other.
"""

import functools
import socket
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist

from equipoise.accelerator import Accelerator
from equipoise.distributed.weight_update.client import BroadcastGroup, EngineClient
from equipoise.distributed.weight_update.group import UpdateGroup, serve_store
from equipoise.distributed.weight_update.manifest import Manifest
from equipoise.distributed.weight_update.phases import Phases
from equipoise.distributed.weight_update.sender import WeightSource, WeightUpdate
from equipoise.errors import WeightUpdateError

NUM_SLOTS = 2


class DistributedUpdate(WeightUpdate):
    """See the module docstring.

    address: of this host as the engines see it. backend: None, the accelerator's for weight updates. name: of the
    groups; engines that already have groups of that name leave them first.
    """

    def __init__(
        self,
        source: WeightSource,
        clients: Sequence[EngineClient],
        accelerator: Accelerator,
        *,
        address: str = "127.0.0.1",
        backend: str | None = None,
        name: str = "equipoise-update",
        **options: Any,
    ) -> None:
        super().__init__(source, clients, accelerator, **options)
        self.address, self.name = address, name
        self.backend = backend or accelerator.weight_update_backend()
        self.group: BroadcastGroup | None = None
        self._room: torch.Tensor | None = None
        self._senders: list[int] = []

    @property
    def extra_bytes(self) -> int:
        return 0 if self._room is None else self._room.numel()

    def disconnect(self) -> None:
        """Ends the groups, say before the trainer's devices are used for something else; the next update makes new
        ones. Collective."""
        names = [self._group_name(rank) for rank in self._senders]
        self._release()

        def leave(client: EngineClient) -> None:
            for name in names:
                client.leave_group(name)

        self._on_rank_0(leave)

    def _group_name(self, sender: int) -> str:
        return f"{self.name}-{sender}"

    def _order(self) -> list[list[str]]:
        """Tensors of one owner together: first those that several ranks hold parts of."""
        by_holders: dict[tuple[int, ...], list[str]] = {}
        for name in self._specs:
            holders = self.packer.holders[name]
            alone = len(holders) == 1 and (holders == (0,) or not self.layout.one_sender)
            by_holders.setdefault(holders if alone else (), []).append(name)
        return [by_holders[key] for key in sorted(by_holders)]

    def _plan(self) -> None:
        pass

    def _connect(self) -> None:
        size = max((bucket.num_bytes for bucket in self.packer.buckets), default=0)
        self._slot_bytes = -(-max(size, 1) // 256) * 256
        if self._room is None:
            self._room = torch.empty(NUM_SLOTS * self._slot_bytes, dtype=torch.uint8, device=self.device)
        if self._senders:
            return
        owners = {self.packer.bucket_holders(index)[0] for index in range(len(self.packer.buckets))}
        senders = sorted(owners)
        stores: list[dist.TCPStore] = []
        own_ports: list[int] = []
        make = self.clients[0].group_maker
        size = 1 + sum(info.num_ranks for info in self.infos)

        def serve() -> None:
            if self.rank in senders and make is None:
                stores.append(serve_store(self.address, self.deadline_s))
                own_ports.append(stores[0].port)
            elif self.rank in senders:
                own_ports.append(_free_port(self.address))

        def meet() -> None:
            calls = []
            if self.rank == 0:
                for sender in senders:
                    offset = 1
                    for client, info in zip(self.clients, self.infos):
                        calls.append(self._call(self._join, client, ports[sender], offset, size, sender))
                        offset += info.num_ranks
            if own_ports:
                if make is None:
                    own = self._call(self._make_group, stores[0], size)
                else:
                    own = self._call(make, self.address, own_ports[0], size, self.device)
                self._wait(own.done, calls, "the engines did not join the weight-update group")
                self.group = own.result()
            self._finish_calls(calls)

        self._together(serve)
        ports = self._gather(own_ports[0] if own_ports else None)
        self._together(meet)
        self._senders = senders

    def _join(self, client: EngineClient, port: int, offset: int, size: int, sender: int) -> None:
        name = self._group_name(sender)
        client.leave_group(name)  # of a trainer that was here before
        client.join_group(self.address, port, offset, size, name, self.backend)

    def _make_group(self, store: dist.TCPStore, size: int) -> UpdateGroup:
        if self.device.type != "cpu":
            self.accelerator.set_device(self.device.index or 0)  # the current device is a thread's own
        name = self._group_name(self.rank)
        return UpdateGroup(self.accelerator, name, store, 0, size, self.deadline_s, self.backend)

    def _release(self) -> None:
        if self.group is not None:
            self.group.close(abort=True)
        self.group, self._room, self._senders = None, None, []

    def _move(self, manifest: Manifest, phases: Phases) -> dict[int, torch.Tensor]:
        assert self._room is not None
        packer, calls = self.packer, []
        owners = [packer.bucket_holders(index) for index in range(len(manifest.buckets))]
        if self.rank == 0:
            for sender in self._senders:
                indices = [index for index, holders in enumerate(owners) if holders[0] == sender]
                name = self._group_name(sender)
                calls += [self._call(client.receive, manifest, name, indices) for client in self.clients]
        sums: dict[int, torch.Tensor] = {}
        under_way: list[list[dist.Work]] = [[] for _ in range(NUM_SLOTS)]
        collective = [index for index, holders in enumerate(owners) if len(holders) > 1]
        own = [index for index, holders in enumerate(owners) if holders == [self.rank]]

        def free(turn: int) -> None:
            with phases.host("wire"):
                self._wait_sent(under_way[turn], calls)

        def send(index: int, turn: int) -> None:
            assert self._room is not None
            slot = self._room[turn * self._slot_bytes : (turn + 1) * self._slot_bytes]
            total = self._fill(index, slot, phases)
            if owners[index][0] == self.rank:
                sums[index] = total
                under_way[turn] = self._send(manifest, index, slot)

        def rest() -> None:
            for number, index in enumerate(own, len(collective)):
                free(number % NUM_SLOTS)
                send(index, number % NUM_SLOTS)
            for turn in range(NUM_SLOTS):
                free(turn)
            with phases.host("wire"):
                for seconds in self._finish_calls(calls):
                    phases.add_engine(seconds)

        for number, index in enumerate(collective):
            self._together(functools.partial(free, number % NUM_SLOTS))
            send(index, number % NUM_SLOTS)
        self._together(rest)
        return sums

    def _send(self, manifest: Manifest, index: int, slot: torch.Tensor) -> list[dist.Work]:
        assert self.group is not None
        bucket = manifest.buckets[index]
        if self.layout.flattened:
            return [self.group.broadcast(slot[: bucket.num_bytes])]
        works = []
        for name, _, _, offset in bucket.pieces:
            spec = manifest.tensors[name]
            data = slot[offset : offset + spec.num_rows * spec.row_bytes]
            works.append(self.group.broadcast(data.view(spec.torch_dtype).view(spec.shape)))
        return works

    def _wait_sent(self, works: list[dist.Work], calls: list) -> None:
        for work in works:
            self._wait(work.is_completed, calls, "a broadcast of weights")
            try:
                work.wait()
            except RuntimeError as error:
                raise WeightUpdateError(
                    f"a broadcast of weights failed: {str(error).splitlines()[0]}. Is every engine alive?"
                ) from error
        works.clear()


def _free_port(address: str) -> int:
    """A port of this host that was free a moment ago: the engine's library opens its store itself."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
