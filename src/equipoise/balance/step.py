"""What one layer and microbatch needs of the balancer: its plan, physical ids, weights and gradients of replicas.

A `Step` is a value. Autograd nodes of its forward hold it, so it lives as long as the graph of that forward, and any
number of layers and microbatches can be in flight. It never holds tensors of the graph, which would keep both alive.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Shard

from equipoise.balance.compute import Counts, dual_add_bias, dual_linear, dual_mlp
from equipoise.balance.plan import BalancePlan
from equipoise.balance.replicas import Copies, Masters, Replica, as_masters, replicas_of
from equipoise.balance.transport.base import GradientPull
from equipoise.errors import ConfigError, PlanError
from equipoise.kernels.ranges import named_range
from equipoise.kernels.rows import RowMaker

if TYPE_CHECKING:
    from equipoise.balance.runtime import Balancer


class _Link:
    """Binds masters that entered a layer before it was routed to the step that came of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.step: Step | None = None


class _Join(torch.autograd.Function):
    """Identity on a rank's masters. Its backward adds the gradients of their replicas, which have come home by then."""

    @staticmethod
    def forward(ctx, link, *masters):
        ctx.link = link
        return tuple(master.view_as(master) for master in masters)

    @staticmethod
    def backward(ctx, *grads):
        step = ctx.link.step
        return None, *(grads if step is None else step.join_gradients(ctx.link.name, grads))


class _Leave(torch.autograd.Function):
    """Identity on a layer's output. Its backward, the first of the layer, starts bringing the replicas back."""

    @staticmethod
    def forward(ctx, y, step):
        ctx.step = step
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        ctx.step.restore()
        return grad, None


class SortedSlots(NamedTuple):
    """This rank's slots sorted by physical expert, on the device; see `dispatch.base.DeviceExchange`."""

    row_TK: torch.Tensor
    valid_TK: torch.Tensor | None
    before_J: torch.Tensor


@dataclass(frozen=True)
class Entered:
    """A rank's masters of one weight name on their way through a layer; see `Balancer.enter`."""

    link: _Link
    tensors: tuple[torch.Tensor, ...]
    has_node: bool


@dataclass(frozen=True)
class Attached:
    """Masters and replicas of one weight name in one step; given to the step's products."""

    step: "Step"
    name: str
    tensors: tuple[torch.Tensor, ...]


def flatten_masters(name: str, masters: Masters) -> tuple[torch.Tensor, ...]:
    """Local tensors: one stacked, or one per master.

    Raises:
        ConfigError: DTensors that split single experts.
    """
    tensors, first_dim = ([masters], 1) if isinstance(masters, torch.Tensor) else (list(masters), 0)
    return tuple(_local(name, t, first_dim) if isinstance(t, DTensor) else t for t in tensors)


def _local(name: str, tensor: DTensor, first_dim: int) -> torch.Tensor:
    """`first_dim`: where the dimensions of one expert begin."""
    for axis, placement in enumerate(tensor.placements):
        if not isinstance(placement, Shard) or tensor.device_mesh.size(axis) == 1:
            continue
        if placement.dim % tensor.dim() >= first_dim:
            raise ConfigError(
                f"weight {name!r} is split within each expert (Shard({placement.dim}) of {tuple(tensor.shape)}): "
                "balancing cannot be combined with expert tensor parallelism, since a replica needs its expert's whole "
                "weight on one rank. Attach whole experts, or leave balancing off"
            )
    return tensor.to_local()


def enter_masters(name: str, masters: Masters) -> Entered:
    """Masters behind their join node, if their gradient is wanted."""
    tensors, link = flatten_masters(name, masters), _Link(name)
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return Entered(link, _Join.apply(link, *tensors) if wanted else tensors, wanted)


class Step:
    """See the module docstring. Made by `Balancer.route`.

    ids_TK: logical ids of the first forward. physical_ids_TK: same positions and dtype, for the dispatcher.
    plan: the plan, on the CPU, or on the device if its transport reads it there; nothing is read on the host then.
    permutation: of the physical ids, if the reroute made it. before_J: with it, for dispatchers on the device.
    """

    def __init__(
        self,
        balancer: "Balancer",
        key: Hashable,
        ids_TK: torch.Tensor,
        physical_ids_TK: torch.Tensor,
        plan: BalancePlan,
        sorted_slots: "SortedSlots | None" = None,
    ) -> None:
        self._balancer, self.key, self.plan = balancer, key, plan
        self.ids_TK, self.physical_ids_TK = ids_TK, physical_ids_TK
        self.num_masters = plan.placement.num_masters
        self.sorted_slots = sorted_slots
        self.has_replicas = sorted_slots is not None or bool(self.replicas)
        self.copies = Copies(plan.slot_expert, () if sorted_slots is not None else self.replicas)
        self._masters: dict[str, Masters] = {}
        self._pulls: dict[str, GradientPull] = {}

    def __repr__(self) -> str:
        return f"Step(key={self.key})"

    @cached_property
    def replicas(self) -> list[Replica]:
        """The plan's copies. A host sync if the plan is on an accelerator."""
        return replicas_of(self.plan.placement)

    @cached_property
    def counts(self) -> list[int]:
        """Rows that each local physical expert receives, masters first. A host sync likewise."""
        return self.plan.recv.sum(0).tolist()

    @property
    def exchange(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """int32 on the CPU: rows sent to each local expert of each rank, and received from each rank; both [P, M+R].
        None where the host does not know the plan; `device_exchange` is for dispatchers on the device."""
        if self.sorted_slots is not None:
            return None
        return self.plan.send.view(self.plan.recv.shape), self.plan.recv

    @property
    def device_exchange(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """The fields of `dispatch.base.DeviceExchange`, in their order; None where the plan was made on the host."""
        if self.sorted_slots is None:
            return None
        return *self.sorted_slots[:2], self.plan.send, self.plan.quota, self.sorted_slots.before_J

    # The forward.

    def attach(self, name: str, masters: Masters | Entered) -> Attached:
        """Starts pushing this rank's masters of one weight name to their replicas.

        Args:
            name: one of the balancer's weight names.
            masters: stacked [M, N, K] or M tensors [N, K] (of a bias [M, N] or M tensors [N]), plain or DTensors of
                which this rank's part is meant, in the balancer's dtype; or what `Balancer.enter` gave.

        Raises:
            ConfigError: an unknown name, masters of another shape or dtype, or split within experts.
        """
        balancer = self._balancer
        if not isinstance(masters, Entered):
            if self.has_replicas:
                masters = enter_masters(name, masters)
            else:
                masters = Entered(_Link(name), flatten_masters(name, masters), False)
        if masters.link.name != name:
            raise ConfigError(f"masters that entered as {masters.link.name!r} are attached as {name!r}")
        balancer.check_masters(name, masters.tensors, masters.has_node)
        masters.link.step = self
        self._masters[name] = as_masters([t.detach() for t in masters.tensors], self._num_dims(name))
        if self.has_replicas:
            balancer.slots.hold(self, name)
        return Attached(self, name, masters.tensors)

    def grouped_linear(
        self,
        rows_RK: torch.Tensor,
        counts: torch.Tensor | Sequence[int],
        weight: Attached,
        kernel: str = "auto",
        bias: Attached | None = None,
    ) -> torch.Tensor:
        """rows_RN: each row times the weight [N, K] of its local physical expert, plus that expert's bias [N].

        Args:
            rows_RK: rows grouped by local physical expert, masters first; rows past the counts belong to nobody.
            counts: rows of each local physical expert. On the host they may differ from the plan (row padding); a
                tensor on an accelerator has to equal it, which saves a host sync.
            weight: from `attach`.
            kernel: `auto`, `loop`, `grouped_mm` or `triton`.
            bias: from `attach`. It is added in the rows' dtype; its gradient is a sum over rows in FP32.
        """
        known = self._counts(counts, rows_RK.device)
        rows_RN = dual_linear(rows_RK, known, weight, kernel)
        return rows_RN if bias is None else dual_add_bias(rows_RN, known, bias)

    def grouped_mlp(
        self,
        rows_RD: torch.Tensor,
        counts: torch.Tensor | Sequence[int],
        gate_up: Attached,
        down: Attached,
        kernel: str = "auto",
        make_rows: RowMaker | None = None,
        weights_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """SwiGLU experts in one piece: `gate_up` [2 * I, D] with the gate rows first, `down` [D, I]. `make_rows`: what
        the dispatcher gave, if the result goes to its `combine` as it is. `weights_R`: float32, to multiply outputs by.

        Raises:
            PlanError: the rows that arrived are not those that the plan sent (checked where the counts are on the CPU).
        """
        known = self._counts(counts, rows_RD.device)
        if rows_RD.device.type == "cpu" and known.host != self.counts:
            raise PlanError(f"{self.where}: rows {known.host} arrived, the plan sent {self.counts}")
        return dual_mlp(rows_RD, known, gate_up, down, kernel, make_rows, weights_R)

    def _counts(self, counts: torch.Tensor | Sequence[int], device: torch.device) -> Counts:
        if isinstance(counts, torch.Tensor):
            if counts.device.type != "cpu":
                return Counts(lambda: self.counts, counts)
            given = counts.tolist()
            return Counts(lambda: given, counts)
        host = list(counts)
        return Counts(lambda: host, torch.tensor(host) if device.type == "cpu" else torch.tensor(host).to(device))

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        """Optional, on the layer's combined output: the backward then restores the replicas as early as possible."""
        if self.has_replicas and torch.is_grad_enabled() and y.requires_grad:
            return _Leave.apply(y, self)
        return y

    def routing_map(self, weights_TK: torch.Tensor) -> torch.Tensor:
        """The dense form that some dispatchers take: weights_TI over physical experts, 0 where a token does not go."""
        ids_TK = self.physical_ids_TK.long()
        dense_TI = weights_TK.new_zeros(ids_TK.shape[0], self._balancer.num_physical_experts + 1)
        ids_TK = torch.where(ids_TK < 0, dense_TI.shape[1] - 1, ids_TK)
        return dense_TI.scatter_add(1, ids_TK, weights_TK)[:, :-1]

    def _num_dims(self, name: str) -> int:
        return len(self._balancer.buffers.shapes[name])

    # What the compute asks for. Every rank asks in the same order.

    @property
    def where(self) -> str:
        """The step in words, for errors."""
        if isinstance(self.key, tuple) and len(self.key) == 2:
            return f"layer {self.key[0]}, microbatch {self.key[1]}"
        return f"step {self.key}"

    def slots(self, name: str) -> torch.Tensor | None:
        """Weights [R, N, K] of this step's replicas in this rank's slots; None when the plan has no replicas."""
        return self._balancer.slots.weights(self, name) if self.has_replicas else None

    def coming_slots(self, name: str) -> tuple[torch.Tensor | None, list[Callable[[], None]]]:
        """The same before the weights are complete, and what has to be called before each part of them is read: none,
        one or two (see `Pending`)."""
        return self._balancer.slots.coming_weights(self, name) if self.has_replicas else (None, [])

    def masters(self, name: str) -> Masters:
        """This rank's masters, detached."""
        return self._masters[name]

    def restore(self) -> None:
        """Starts bringing this step's replicas back to the slots, unless they are there: what the backward takes first,
        which is the last of what the forward took."""
        self._balancer.remember(self)
        for name in reversed(self._masters):
            self._balancer.slots.hold(self, name)

    def gradient_slots(self, name: str) -> torch.Tensor | None:
        """float32 [R, N, K] that this rank's replicas write their gradients to; free of earlier transfers."""
        return self._balancer.acquire_gradients(self, name) if self.has_replicas else None

    def send_gradients(self, name: str, gradients: Sequence[torch.Tensor | None]) -> None:
        """Starts bringing the gradients home, after they were written. `gradients`: of this rank's masters, in the form
        in which these were given; the transport may add to them until they are joined."""
        if self.has_replicas:
            given = [gradient for gradient in gradients if gradient is not None]
            self._pulls[name] = self._balancer.pull_gradients(self, name, given)

    def join_gradients(self, name: str, grads: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Gradients of the masters plus those of their replicas, added in FP32 in order of physical id.

        They are added in place: the gradients are those that the expert compute has just made.
        """
        pull = self._pulls.pop(name, None)
        if pull is None:
            return tuple(grads)
        if pull.added_to is not None and [g.data_ptr() for g in grads] != [g.data_ptr() for g in pull.added_to]:
            pull.force()
            raise RuntimeError(
                f"{self.where}: the gradient of {name!r} was copied on its way to the masters, without what "
                "replicas add to it. Use each attached weight in one product of a step, without hooks on it"
            )
        grads = [g.contiguous() for g in grads]
        rows = as_masters(grads, self._num_dims(name))
        rounded: dict[int, torch.Tensor] = {}

        def add(local: int, gradient: torch.Tensor) -> None:
            row = rows[local]
            if row.dtype == torch.float32:
                row.add_(gradient)
            elif local in rounded:
                rounded[local].add_(gradient)
            else:
                rounded[local] = row.float().add_(gradient)

        with named_range("moe.reduce"):
            pull.finish(add)
            for local, total in rounded.items():
                rows[local].copy_(total)
        return tuple(grads)
