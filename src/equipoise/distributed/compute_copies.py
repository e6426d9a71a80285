"""16-bit copies of FP32 weights, to compute with: mixed precision where a weight has only one rank.

FSDP over one rank gathers and reduces nothing, and yet passes each weight and each gradient through several buffers.
Here a copy is kept instead. It is refreshed where its master has changed, and each gradient that reaches it goes to the
master at once, added in FP32. The numbers are those of FSDP's policy (parameters in 16 bits, reductions in FP32).

The masters remain the modules' parameters: optimizer, checkpoints and exports see nothing else, under the usual names.
A copy lies in the instance dictionary of its module under the parameter's name. Python looks there first, so whatever
reads `module.weight` computes with the copy.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from equipoise.distributed.local import local_part


@dataclass
class _Pair:
    """master: the parameter, in FP32. copy: this rank's part of it; a leaf of the graph. seen: the state of the master
    that the copy has."""

    master: nn.Parameter
    copy: torch.Tensor
    seen: int = -1

    is_narrow: bool = False
    """Whether the first gradient of a step stays in 16 bits."""

    def state(self) -> int:
        """Grows with each change in place, of the parameter or of the tensor inside of it."""
        return self.master._version + local_part(self.master)._version

    @torch.no_grad()
    def take_gradient(self, copy: torch.Tensor) -> None:
        """Moves what the copy has got to the master."""
        gradient, copy.grad = copy.grad, None
        master = self.master
        if gradient is None:
            return
        present = master.grad
        if present is None:
            master.grad = self._as_master(gradient if self.is_narrow else gradient.to(master.dtype))
        elif present.dtype == master.dtype:
            local_part(present).add_(gradient)
        else:
            master.grad = self._as_master(local_part(present).to(master.dtype).add_(gradient))

    def _as_master(self, local: torch.Tensor) -> torch.Tensor:
        """In the form of the master."""
        master = self.master
        if not isinstance(master, DTensor):
            return local
        mesh, placements = master.device_mesh, master.placements
        shape, stride = master.shape, master.stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _count_changes(copies: "ComputeCopies | None", optimizer: torch.optim.Optimizer) -> None:
    if copies is not None and getattr(optimizer, "copies", None) is not copies:
        copies.are_stale(parameter for group in optimizer.param_groups for parameter in group["params"])


class ComputeCopies:
    """The copies of a model. `refresh` has to come before a forward; a hook of the model does it.

    An optimizer that keeps the copies up to date itself has them as its attribute `copies`.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._pairs: dict[int, _Pair] = {}
        weak = weakref.ref(self)
        # Fused optimizers change parameters without counting: after the step of any optimizer, they are counted here.
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: _count_changes(weak(), optimizer))
        weakref.finalize(self, hook.remove)

    def add(self, module: nn.Module) -> None:
        """Makes copies of all parameters of a module and those inside of it, tied ones once.

        A copy is as wide as this rank's part of a DTensor. It has no values before the first `refresh`.
        """
        for child in module.modules():
            for name, master in child._parameters.items():
                if master is not None:
                    child.__dict__[name] = self._make(master)

    def _make(self, master: nn.Parameter) -> torch.Tensor:
        pair = self._pairs.get(id(master))
        if pair is None:
            copy = torch.empty_like(local_part(master), dtype=self.dtype, requires_grad=True)
            pair = self._pairs[id(master)] = _Pair(master, copy)
            copy.register_post_accumulate_grad_hook(pair.take_gradient)
        return pair.copy

    def copy_of(self, master: torch.Tensor) -> torch.Tensor | None:
        """The copy of a parameter, if it has one; this rank's part."""
        pair = self._pairs.get(id(master))
        return None if pair is None else pair.copy

    def are_stale(self, masters: Iterable[torch.Tensor]) -> None:
        """Says that these masters have changed, in a way that their version counters may not show."""
        for master in masters:
            pair = self._pairs.get(id(master))
            if pair is not None:
                pair.seen = -1

    def are_fresh(self, masters: Iterable[torch.Tensor]) -> None:
        """Says that these masters' copies were brought up to date with them."""
        for master in masters:
            pair = self._pairs.get(id(master))
            if pair is not None:
                pair.seen = pair.state()

    def narrow_gradients(self) -> None:
        """From now on, masters get the gradient of a step's first microbatch in 16 bits, as it is. It becomes FP32 when
        a second one is added. For an optimizer that takes both; nothing happens where torch (before 2.10) cannot."""
        for pair in self._pairs.values():
            pair.is_narrow = hasattr(pair.master, "grad_dtype")
            if pair.is_narrow:
                pair.master.grad_dtype = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Brings the copies of changed masters up to date, and takes over which are trained. No host sync.

        A change through `tensor.data` is not noticed: say so with `are_stale`.
        """
        stale = []
        for pair in self._pairs.values():
            if pair.copy.requires_grad != pair.master.requires_grad:
                pair.copy.requires_grad_(pair.master.requires_grad)
            state = pair.state()
            if state != pair.seen:
                pair.seen = state
                if pair.copy.untyped_storage().size() == 0:
                    pair.copy.untyped_storage().resize_(pair.copy.numel() * pair.copy.itemsize)
                stale.append(pair)
        if stale:
            torch._foreach_copy_([pair.copy for pair in stale], [local_part(pair.master).detach() for pair in stale])

    def release(self) -> int:
        """Frees the copies' memory until the next `refresh`; returns the bytes. Between steps only."""
        freed = 0
        for pair in self._pairs.values():
            freed += pair.copy.untyped_storage().size()
            pair.copy.untyped_storage().resize_(0)
            pair.seen = -1
        return freed
