"""The runtime of exact-load balancing: one `Balancer` per EP group, shared by all of its MoE layers.

Order of a layer: `enter` (optional, before attention), `route`, `attach`, the host's dispatch, products, the host's
combine, `leave` (optional). Every rank of the group makes the same calls in the same order, also with zero tokens;
all calls of one balancer are made with the same current stream.

The slots belong to nobody for long: a step that needs its replicas in them becomes their tenant, which starts a push;
the next step evicts it. Whatever finds its step evicted (a backward, mostly) makes it the tenant again. So any order
of forwards, recomputes and backwards is right, and the usual one pushes once for each forward and once for each
backward, in advance. A recomputed forward and its backward share one push.
"""

import math
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from equipoise.balance.config import BalanceConfig, planner_settings
from equipoise.balance.device_planner import ExchangingPlanner
from equipoise.balance.own_planner import place_by_own
from equipoise.balance.plan import BalancePlan, Placement, experts_per_rank
from equipoise.balance.protocol import Planner, check_sizes
from equipoise.balance.registry import planner_maker
from equipoise.balance.replicas import Masters, ReplicaBuffers
from equipoise.balance.reroute import count_load, reroute
from equipoise.balance.splits import complete_plan
from equipoise.balance.step import Entered, SortedSlots, Step, enter_masters
from equipoise.balance.transport.base import GradientPull, Pending, Transport
from equipoise.balance.transport.collective import CollectiveTransport
from equipoise.balance.transport.domain import DomainBuffers, DomainTransport
from equipoise.balance.transport.symmetric import SymmetricBuffers, SymmetricTransport
from equipoise.balance.unseen import unseen
from equipoise.distributed.collectives import Group, live_group
from equipoise.errors import ConfigError
from equipoise.kernels.ranges import named_range
from equipoise.kernels.reroute import reroute_permutation

if TYPE_CHECKING:
    from equipoise.symmetric.space import SymmetricSpace

_MAX_HELD = 1024
_MAX_RECORDS = 1 << 14


@dataclass(frozen=True)
class LoadRecord:
    """What balancing did for one layer and microbatch of this EP group. Equal on its ranks but for `seconds`.

    before, after: largest over mean rank load, by the router's choice and as delivered; 1 without tokens.
    copies: replicas. num_bytes: their weights' bytes, one way. seconds: exchange of counts and planning on this rank.
    """

    key: Hashable
    before: float
    after: float
    copies: int
    num_bytes: int
    seconds: float


class _UnreadRecord(NamedTuple):
    """What a record is made of, on the device until somebody asks."""

    key: Hashable
    load_E: torch.Tensor
    placement: Placement


class DeviceRecords(NamedTuple):
    """Records that nobody has read on the host; see `LoadRecord`.

    keys: of N records. after_N: float64, copies_N: int64, on the device. copy_bytes: of one replica's weights.
    """

    keys: tuple[Hashable, ...]
    after_N: torch.Tensor
    copies_N: torch.Tensor
    copy_bytes: int


def _in_backward() -> bool:
    """Whether autograd is running: a forward is then one that is run again."""
    return torch._C._current_graph_task_id() != -1


def _moving_weights() -> AbstractContextManager[Any]:
    """The profiler's name for sending weights of replicas: to a forward, or back for a backward."""
    return named_range("moe.restore" if _in_backward() else "moe.push")


class _Slots:
    """Who is in the slots, by weight name, and what is still on its way there."""

    def __init__(self, transport: Transport, buffers: ReplicaBuffers) -> None:
        self.transport, self.buffers = transport, buffers
        self._tenants: dict[str, weakref.ref[Step]] = {}
        self._pending: dict[str, Pending] = {}

    def hold(self, step: Step, name: str) -> None:
        """Makes a step the tenant and starts its push, unless it is the tenant."""
        tenant = self._tenants.get(name)
        if tenant is not None and tenant() is step:
            return
        self.wait(name)  # two receives into one slot would race
        self._tenants.pop(name, None)  # nobody's, should the push fail
        what = f"weights {name!r} of {step.where}"
        with unseen(), _moving_weights():
            self._pending[name] = self.transport.push_weights(name, step.copies, step.masters(name), what)
        self._tenants[name] = weakref.ref(step)

    def weights(self, step: Step, name: str) -> torch.Tensor:
        """The slots with the step's replicas in them, complete."""
        self.hold(step, name)
        self.wait(name)
        return self.buffers.weights(name)

    def coming_weights(self, step: Step, name: str) -> tuple[torch.Tensor, list[Callable[[], None]]]:
        """The same before they are complete, and what to call before each part of them is read."""
        self.hold(step, name)
        pending = self._pending.get(name)
        parts = range(0 if pending is None else pending.num_parts - 1)
        waits: list[Callable[[], None]] = [partial(self.wait, name, part) for part in parts]
        return self.buffers.weights(name), waits if pending is None else [*waits, partial(self.wait, name)]

    def wait(self, name: str, part: int = -1) -> None:
        """What is on its way to the slots, or a part of it, has arrived, for the current stream."""
        pending = self._pending.pop(name, None) if part == -1 else self._pending.get(name)
        if pending is not None:
            with unseen(), _moving_weights():
                pending.wait(part)


class Balancer:
    """Exact-load balancing for the MoE layers of one EP group, in our models or anybody's.

    Args:
        ep_group: the ranks that share one set of experts; expert e is at home on rank e // M. None: one rank. Give a
            mesh of one axis if the groups of the run may be parked.
        num_experts: logical experts E of a layer; the same for all layers.
        weights: shape of one expert's tensor by name: (N, K) of a weight, (N,) of a bias.
        dtype: dtype of the masters as they are computed with.
        config: see `BalanceConfig`.
        transport_group: group of the same ranks for weights and gradients of replicas; with NCCL a group of its own
            lets them overlap with the dispatcher. Default: `ep_group`.
        space: symmetric memory of the EP group. Plans are then made on the device and weights and gradients of replicas
            move without the host: no call waits for the device. Otherwise by messages of the group. The symmetric
            memory of a domain, consecutive ranks of the group, is used for replicas whose experts are at home there, by
            plans of the host.

    Buffers are allocated when the first replica needs them. They hold `num_redundant_experts_per_rank` experts' weights
    and FP32 gradients and `reduction_rows` FP32 gradients for the group, however many layers there are.

    Raises:
        ConfigError: sizes that do not divide, an unknown planner, a dtype of fewer than 16 bits.
    """

    def __init__(
        self,
        ep_group: Group | None,
        num_experts: int,
        weights: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        config: BalanceConfig | None = None,
        transport_group: Group | None = None,
        space: "SymmetricSpace | None" = None,
    ) -> None:
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise ConfigError(
                f"experts in {dtype} cannot be balanced: FP8 and other dtypes of fewer than 16 bits need scales, which "
                "replicas do not carry. Compute the experts in torch.bfloat16 or torch.float32, or leave balancing off"
            )
        self.config = config or BalanceConfig()
        self.settings = planner_settings(self.config)
        self._group, self.num_experts, self.dtype = ep_group, num_experts, dtype
        self.num_ranks = 1 if ep_group is None else ep_group.size()
        self.rank = 0 if ep_group is None else dist.get_rank(live_group(ep_group))
        check_sizes(num_experts, self.num_ranks, self.settings)
        self.num_masters = experts_per_rank(num_experts, self.num_ranks)
        self.num_slots = self.settings.num_slots
        self._device_planner: ExchangingPlanner | None = None
        self.buffers: ReplicaBuffers
        self.transport: Transport
        if space is None:
            self.buffers = ReplicaBuffers(weights, self.num_slots, dtype, self.config.reduction_rows)
            self.transport = CollectiveTransport(transport_group or ep_group, self.buffers)
        elif space.num_ranks < self.num_ranks:
            self.buffers = DomainBuffers(weights, self.num_slots, dtype, space, self.config.reduction_rows)
            self.transport = DomainTransport(
                space, transport_group or ep_group, self.buffers, self.num_masters, self.rank - space.rank
            )
        else:
            if self.config.planner != "exact_load":
                raise ConfigError(
                    f"planner {self.config.planner!r} runs on the host, the symmetric transport needs plans on the "
                    "device: choose planner exact_load, or transport collective"
                )
            self._device_planner = ExchangingPlanner(space, num_experts, self.settings)
            self.buffers = SymmetricBuffers(weights, self.num_slots, dtype, space)
            self.transport = SymmetricTransport(space, self.buffers, self.num_masters)
        self.slots = _Slots(self.transport, self.buffers)
        self._make_planner = planner_maker(self.config.planner)
        self._is_own_planner = ":" in self.config.planner
        self._planners: dict[Hashable, Planner] = {}
        self._steps: weakref.WeakValueDictionary[Hashable, Step] = weakref.WeakValueDictionary()
        self._held: OrderedDict[Hashable, Step] = OrderedDict()
        self._ahead: dict[Hashable, tuple[torch.Tensor, BalancePlan]] = {}
        self._pulls: dict[str, GradientPull] = {}
        self._records: deque[LoadRecord | _UnreadRecord] = deque(maxlen=_MAX_RECORDS)

    @property
    def num_physical_local(self) -> int:
        """M + R: what the dispatcher takes for the number of experts on a rank."""
        return self.num_masters + self.num_slots

    @property
    def num_physical_experts(self) -> int:
        """P * (M + R): what the dispatcher takes for the number of experts."""
        return self.num_ranks * self.num_physical_local

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers allocated by now."""
        return self.buffers.num_bytes

    def enter(self, name: str, masters: Masters) -> Entered:
        """Optional, at the start of a layer, before attention: gradients of replicas then come home behind attention's
        backward. The result takes the masters' place in `Step.attach`. `masters` as there."""
        return enter_masters(name, masters)

    def route(self, ids_TK: torch.Tensor, key: Hashable = None, counts_E: torch.Tensor | None = None) -> Step:
        """Decides the placement of one layer and microbatch from its exact load. Collective over the EP group.

        A forward that is run again inside a backward (activation recompute) gets the step of the first forward of its
        key: nothing is decided, counted or communicated again.

        Args:
            ids_TK: logical ids, int32 or int64; -1 goes nowhere.
            key: (layer, microbatch); different for all that are in flight together. None, where the host numbers no
                microbatches: nothing is remembered, and a recomputed forward decides again, with the same result
                unless the planner learns from earlier loads.
            counts_E: tokens of each expert on this rank, if the router has counted them.

        One host sync on an accelerator, none with a symmetric space: the load matrix [P, E] is read, since the
        placement decides what is sent.

        Raises:
            RuntimeError: a recompute whose step is unknown, or that chose other experts.
            PlanError: a planner of your own broke an invariant, or gave ranks different plans.
        """
        if key is not None and _in_backward():
            with unseen():
                return self._recall(ids_TK, key)
        self.transport.check()
        with torch.no_grad(), unseen(), named_range("moe.plan"):
            decide = self._decide if self._device_planner is None else self._decide_on_device
            step = decide(ids_TK, key, counts_E)
        if key is not None:
            self.remember(step)
            if not torch.is_grad_enabled():  # no graph holds it, and a reentrant checkpoint may ask for it again
                self._held[key] = step
                while len(self._held) > _MAX_HELD:
                    self._held.popitem(last=False)
        return step

    def _decide(self, ids_TK: torch.Tensor, key: Hashable, counts_E: torch.Tensor | None) -> Step:
        started = time.perf_counter()
        ahead = self._ahead.pop(key, None)
        if ahead is None:
            if counts_E is None:
                counts_E = count_load(ids_TK, self.num_experts)
            load_PE = self._gather(counts_E.to(torch.int32)).cpu()  # the one host sync
            ahead = load_PE, self._plan(load_PE, key)
        load_PE, plan = ahead
        on_device = plan
        if ids_TK.device.type != "cpu":
            placement = plan.placement.to(ids_TK.device)
            send, recv = (x.to(ids_TK.device, non_blocking=True) for x in (plan.send, plan.recv))
            on_device = BalancePlan(placement, send, recv, plan.rank)
        step = Step(self, key, ids_TK, reroute(ids_TK, on_device), plan)
        if not _in_backward():
            self._record(step, load_PE, time.perf_counter() - started)
        return step

    def _decide_on_device(self, ids_TK: torch.Tensor, key: Hashable, counts_E: torch.Tensor | None) -> Step:
        assert self._device_planner is not None
        if counts_E is None:
            counts_E = count_load(ids_TK, self.num_experts)
        made = self._device_planner(counts_E.to(torch.int32).contiguous())
        placement = Placement(made.slot_expert, made.quota, self.num_ranks, self.num_experts)
        plan = BalancePlan(placement, made.send, made.recv, self.rank)
        physical_TK, permutation = reroute_permutation(
            ids_TK, made.slot_expert, made.send, self.num_experts, self.num_ranks, self.rank
        )
        slots = SortedSlots(permutation.row_TK, permutation.valid_TK, made.before_J)
        step = Step(self, key, ids_TK, physical_TK, plan, slots)
        if not _in_backward():
            self._records.append(_UnreadRecord(key, made.load_E, placement))
        return step

    def plan_ahead(self, keys: Sequence[Hashable], ids: Sequence[torch.Tensor]) -> None:
        """Plans for several layers whose load is known before their forward, as when recorded routing is replayed: one
        exchange of counts and one host sync for all of them. Collective over the EP group.

        `route` takes these plans; it has to be called with the same ids.

        Args:
            keys: (layer, microbatch) of each.
            ids: logical ids_TK of each.

        Where plans are made on the device there is nothing to gain, and nothing is done.
        """
        if self._device_planner is not None:
            return
        with torch.no_grad(), unseen(), named_range("moe.plan"):
            counts_LE = torch.stack([count_load(ids_TK, self.num_experts) for ids_TK in ids])
            load_PLE = self._gather(counts_LE.flatten()).cpu().view(-1, *counts_LE.shape)
            for number, key in enumerate(keys):
                load_PE = load_PLE[:, number].contiguous()
                self._ahead[key] = load_PE, self._plan(load_PE, key)

    def remember(self, step: Step) -> None:
        """The step that a recompute of its key will get."""
        if step.key is not None:
            self._held.pop(step.key, None)
            self._steps[step.key] = step

    def _recall(self, ids_TK: torch.Tensor, key: Hashable) -> Step:
        step = self._steps.get(key)
        if step is None:
            raise RuntimeError(
                f"no step of key {key!r} is known for this recompute: route the recomputed forward with the key of the "
                "first one"
            )
        self._held.pop(key, None)
        if ids_TK.shape != step.ids_TK.shape or (ids_TK.device.type == "cpu" and not torch.equal(ids_TK, step.ids_TK)):
            raise RuntimeError(
                f"{step.where}: the recomputed forward chose other experts than the first. Give every microbatch in "
                "flight a key of its own, and keep the router's choice instead of recomputing it (ids of the first "
                "forward are in Step.ids_TK)"
            )
        return step

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The present EP group: another one after parking, if it was given as a mesh."""
        return None if self._group is None else live_group(self._group)

    def _gather(self, counts_E: torch.Tensor) -> torch.Tensor:
        if self.num_ranks == 1:
            return counts_E[None]
        load_PE = counts_E.new_empty(self.num_ranks, counts_E.numel())
        dist.all_gather_into_tensor(load_PE.view(-1), counts_E.contiguous(), group=self.group)
        return load_PE

    def _plan(self, load_PE: torch.Tensor, key: Hashable) -> BalancePlan:
        layer = key[0] if isinstance(key, tuple) and key else None
        if layer not in self._planners:
            self._planners[layer] = self._make_planner()
        planner = self._planners[layer]
        if self._is_own_planner:
            group = self.group if self.num_ranks > 1 else None
            placement = place_by_own(planner, self.config.planner, load_PE, self.settings, group)
        else:
            placement = planner(load_PE, self.settings)
        return complete_plan(placement, load_PE, self.rank)

    def _record(self, step: Step, load_PE: torch.Tensor, seconds: float) -> None:
        before = load_PE.view(-1, self.num_ranks, self.num_masters).sum((0, 2)).tolist()
        after = step.plan.placement.rank_load.tolist()
        self._records.append(self._load_record(step.key, before, after, len(step.replicas), seconds))

    def _load_record(
        self, key: Hashable, before: list[int], after: list[int], copies: int, seconds: float
    ) -> LoadRecord:
        """`before`, `after`: tokens of each rank."""
        total = sum(before)
        mean = total / self.num_ranks
        return LoadRecord(
            key,
            max(before) / mean if total else 1.0,
            max(after) / mean if total else 1.0,
            copies,
            copies * self._copy_bytes,
            seconds,
        )

    @property
    def _copy_bytes(self) -> int:
        return sum(map(math.prod, self.buffers.shapes.values())) * self.dtype.itemsize

    def take_records(self) -> list[LoadRecord]:
        """Records of the forwards routed since the last call (the latest 16384), oldest first."""
        records = list(self._records)
        self._records.clear()
        unread = [record for record in records if isinstance(record, _UnreadRecord)]
        read = iter(self._read_records(unread))
        return [next(read) if isinstance(record, _UnreadRecord) else record for record in records]

    def _read_records(self, unread: "Sequence[_UnreadRecord]") -> list[LoadRecord]:
        """One host sync for all."""
        if not unread:
            return []
        load_NE = torch.stack([record.load_E for record in unread])
        before_NP = load_NE.view(len(unread), self.num_ranks, self.num_masters).sum(2)
        after_NP, copies_N = self._delivered(unread)
        numbers = torch.cat([before_NP, after_NP, copies_N[:, None]], 1).tolist()
        P = self.num_ranks
        return [
            self._load_record(record.key, row[:P], row[P : 2 * P], row[2 * P], 0.0)
            for record, row in zip(unread, numbers)
        ]

    def _delivered(self, unread: "Sequence[_UnreadRecord]") -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of each rank by the plans [N, P], and copies [N]."""
        quota = torch.stack([record.placement.quota for record in unread])
        slot_expert = torch.stack([record.placement.slot_expert for record in unread])
        after_NP = quota.view(len(unread), self.num_ranks, self.num_physical_local).sum(2)
        return after_NP, (slot_expert >= 0).sum(1)

    def take_device_records(self) -> DeviceRecords | None:
        """What `take_records` would return, without waiting for the device; None, and nothing is taken, if there are
        none or some are on the host already."""
        unread = [record for record in self._records if isinstance(record, _UnreadRecord)]
        if not unread or len(unread) < len(self._records):
            return None
        self._records.clear()
        after_NP, copies_N = self._delivered(unread)
        mean_N = after_NP.sum(1).double() / self.num_ranks
        after_N = torch.where(mean_N > 0, after_NP.amax(1) / mean_N, 1.0)
        return DeviceRecords(tuple(record.key for record in unread), after_N, copies_N, self._copy_bytes)

    def take_waited_s(self) -> float:
        """Seconds that this rank's host has waited for weights and gradients of replicas since the last call."""
        waited_s, self.transport.waited_s = self.transport.waited_s, 0.0
        return waited_s

    # For steps.

    def check_masters(self, name: str, tensors: Sequence[torch.Tensor], wants_gradients: bool) -> None:
        """Refuses masters that do not fit; learns the device."""
        if name not in self.buffers.shapes:
            raise ConfigError(f"no weight {name!r}: the balancer was made for {', '.join(self.buffers.shapes)}")
        shape = tuple(self.buffers.shapes[name])
        given = [tuple(t.shape) for t in tensors]
        if given not in ([(self.num_masters, *shape)], [shape] * self.num_masters):
            raise ConfigError(
                f"weight {name!r}: this rank has {self.num_masters} masters of shape {shape}, stacked or one by one; "
                f"got {given}"
            )
        for tensor in tensors:
            if tensor.dtype != self.dtype:
                raise ConfigError(
                    f"weight {name!r} is {tensor.dtype}, the balancer was made for {self.dtype}: attach masters in the "
                    "dtype that they are computed with"
                )
        self.transport.prepare(name, tensors[0].device, wants_gradients)

    def acquire_gradients(self, step: Step, name: str) -> torch.Tensor:
        """The slots' gradients, after the last transfer out of them."""
        pull = self._pulls.pop(name, None)
        if pull is not None:
            with named_range("moe.reduce"):
                pull.force()
        return self.buffers.gradients(name)

    def pull_gradients(self, step: Step, name: str, gradients: Sequence[torch.Tensor]) -> GradientPull:
        """Starts the transfer of the slots' gradients to the masters' ranks."""
        with named_range("moe.reduce"):
            pull = self.transport.pull_gradients(name, step.copies, gradients, f"gradients {name!r} of {step.where}")
        self._pulls[name] = pull
        return pull
