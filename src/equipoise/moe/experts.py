"""The routed experts of one rank: SwiGLU feed-forward networks with stacked weights.

Shapes: R rows sorted by local expert, D hidden features, I expert features, M local experts.
"""

from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from equipoise.kernels.grouped_mlp import grouped_mlp
from equipoise.kernels.rows import RowMaker

ExpertKernel = Literal["auto", "loop", "grouped_mm", "triton"]


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter that is sharded over experts; the parameter itself otherwise."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Experts(nn.Module):
    """Weights in the layout of transformers: `gate_up_proj` [M, 2 * I, D] (gate rows first), `down_proj` [M, D, I]."""

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, kernel: ExpertKernel = "auto"
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    def forward(
        self,
        rows_RD: torch.Tensor,
        counts_M: torch.Tensor,
        make_rows: RowMaker | None = None,
        weights_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Outputs in row order, in the dispatcher's memory if it has some, times the rows' weights if there are. Every
        expert takes part in the graph, so idle experts get zero gradients, not None."""
        gate_up, down = local_tensor(self.gate_up_proj), local_tensor(self.down_proj)
        return grouped_mlp(rows_RD, gate_up, down, counts_M, self.kernel, make_rows, weights_R)
