"""AdamW for weights that have 16-bit copies: update, clipping and the copies' refresh in one pass over memory."""

from collections.abc import Iterable
from typing import Any

import torch

from equipoise.distributed.compute_copies import ComputeCopies
from equipoise.distributed.local import local_part


class MasterAdamW(torch.optim.AdamW):
    """The numbers and the state of `torch.optim.AdamW(fused=True)`, for parameters that Triton reaches.

    A gradient that came from one microbatch stays in 16 bits, where it is exact; see `ComputeCopies.narrow_gradients`.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], copies: ComputeCopies, **options: Any) -> None:
        super().__init__(groups, **options)
        self.copies = copies
        copies.narrow_gradients()

    @torch.no_grad()
    def step(self, closure: None = None, gradient_scale: torch.Tensor | None = None) -> None:  # type: ignore[override]
        """One step of all parameters that have a gradient. Takes no closure.

        `gradient_scale`: float32 scalar on the device, which multiplies every gradient (clipping). If it is NaN,
        nothing changes: so a step can be left out without the host's knowing.
        """
        from equipoise.kernels.adamw_triton import adamw

        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for parameter in parameters:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            steps = [self.state[p]["step"] for p in parameters]
            if gradient_scale is None:
                torch._foreach_add_(steps, 1)
            else:  # a list, since one tensor for all would be read on the host
                torch._foreach_add_(steps, [(~gradient_scale.isnan()).float()] * len(steps))
            steps_N = torch.stack(steps).double()  # in FP32, 1 - 0.999 would keep four digits
            first_N, second_N = (1 - beta**steps_N for beta in group["betas"])
            corrections_N2 = torch.stack([first_N, second_N.sqrt()], 1).float()
            options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            copies = [self.copies.copy_of(p) for p in parameters]
            for parameter, copy, corrections_2 in zip(parameters, copies, corrections_N2):
                state = self.state[parameter]
                moments = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
                gradient = local_part(parameter.grad)
                adamw(local_part(parameter), gradient, *moments, copy, corrections_2, gradient_scale, **options)
            changed = [*parameters, *(copy for copy in copies if copy is not None)]
            torch.autograd.graph.increment_version(changed)
            self.copies.are_fresh(parameters)
