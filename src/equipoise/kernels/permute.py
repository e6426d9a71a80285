"""Token permutation: gather tokens into rows sorted by expert, and combine rows back per token.

Both directions and both backward passes gather; nothing scatters with addition, so results are deterministic.
The plain forms here run on the CPU and are what the Triton forms, used on accelerators, are compared with.

Shapes: T tokens, K slots per token, D features, E destinations (experts), R rows.
"""

from typing import NamedTuple

import torch

from equipoise.kernels.triton_support import use_triton


class Permutation(NamedTuple):
    """How the T*K slots map to rows sorted by destination, stable in token order.

    Indices and counts are int64 from the plain form and int32 from the Triton form.

    slot_R: the flat slot (token * K + k) that each row holds. Slots without an expert come last.
    row_TK: the row that each slot went to.
    valid_TK: bool, False where the slot has no expert; None when the caller knows that there is none.
    counts_E: rows of each destination.
    """

    slot_R: torch.Tensor
    row_TK: torch.Tensor
    valid_TK: torch.Tensor | None
    counts_E: torch.Tensor

    @property
    def token_R(self) -> torch.Tensor:
        return self.slot_R // self.row_TK.shape[1]


def make_permutation(ids_TK: torch.Tensor, num_destinations: int) -> Permutation:
    """Sorts the slots by destination id; ids of -1 go to the end and are counted nowhere. No host sync on GPUs."""
    if use_triton(ids_TK.device):
        from equipoise.kernels.reroute_triton import triton_permutation

        return triton_permutation(ids_TK, num_destinations)
    return plain_permutation(ids_TK, num_destinations)


def plain_permutation(ids_TK: torch.Tensor, num_destinations: int) -> Permutation:
    """The reference of `make_permutation`."""
    flat = ids_TK.flatten().long()
    valid_TK = ids_TK >= 0
    # On the CPU the check is free and saves masking later; elsewhere it would be a host sync.
    all_valid = ids_TK.device.type == "cpu" and bool(valid_TK.all())
    key = flat if all_valid else torch.where(flat < 0, num_destinations, flat)
    sorted_R, slot_R = torch.sort(key, stable=True)
    row = torch.empty_like(slot_R)
    row[slot_R] = torch.arange(slot_R.numel(), device=row.device)
    # Not `bincount`, which reads the largest key on the host.
    starts = torch.searchsorted(sorted_R, torch.arange(num_destinations + 1, device=key.device))
    return Permutation(slot_R, row.view(ids_TK.shape), None if all_valid else valid_TK, starts.diff())


def _gather_sum(
    rows_RD: torch.Tensor,
    row_TK: torch.Tensor,
    valid_TK: torch.Tensor | None,
    weights_TK: torch.Tensor | None,
) -> torch.Tensor:
    """For each token the FP32 sum over its slots of (weight times) its row; invalid slots add exactly 0."""
    total = torch.zeros(row_TK.shape[0], rows_RD.shape[1], dtype=torch.float32, device=rows_RD.device)
    if rows_RD.shape[0] == 0:
        return total
    row_TK = row_TK.clamp(max=rows_RD.shape[0] - 1)  # an invalid slot may point past the end; it is masked below
    for k in range(row_TK.shape[1]):
        picked = rows_RD.index_select(0, row_TK[:, k]).float()
        if valid_TK is not None:
            picked = picked.masked_fill(~valid_TK[:, k, None], 0)
        if weights_TK is None:
            total += picked
        else:
            total.addcmul_(picked, weights_TK[:, k, None].float())
    return total


def gather_slots(
    rows_SD: torch.Tensor,
    row_TK: torch.Tensor,
    valid_TK: torch.Tensor | None,
    weights_TK: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Sums [T, D] over a token's slots of (weight times) the rows that `row_TK` names, in FP32, as `dtype`.

    Rows of slots that are not valid may hold anything, NaN too. Outside of autograd.
    """
    if use_triton(rows_SD.device):
        from equipoise.kernels.permute_triton import gather_sum

        return gather_sum(rows_SD, row_TK, valid_TK, weights_TK, dtype)
    return _gather_sum(rows_SD, row_TK, valid_TK, weights_TK).to(dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, token_R, row_TK, valid_TK):
        ctx.save_for_backward(row_TK, valid_TK)
        return x_TD.index_select(0, token_R)

    @staticmethod
    def backward(ctx, grad_RD):
        row_TK, valid_TK = ctx.saved_tensors
        return _gather_sum(grad_RD, row_TK, valid_TK, None).to(grad_RD.dtype), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, weights_TK, slot_R, row_TK, valid_TK, dtype):
        ctx.save_for_backward(None if weights_TK is None else rows_RD, weights_TK, slot_R, row_TK, valid_TK)
        ctx.dtype = rows_RD.dtype
        return _gather_sum(rows_RD, row_TK, valid_TK, weights_TK).to(dtype)

    @staticmethod
    def backward(ctx, grad_TD):
        rows_RD, weights_TK, slot_R, row_TK, valid_TK = ctx.saved_tensors
        num_slots = row_TK.shape[1]
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_R = grad_TD.index_select(0, slot_R // num_slots).float()
            if weights_TK is not None:
                grad_R *= weights_TK.flatten().index_select(0, slot_R)[:, None].float()
            if valid_TK is not None:
                grad_R = grad_R.masked_fill(~valid_TK.flatten().index_select(0, slot_R)[:, None], 0)
            grad_rows = grad_R.to(ctx.dtype)
        if weights_TK is not None and ctx.needs_input_grad[1]:
            grad_weights = torch.zeros_like(weights_TK)
            if rows_RD.shape[0]:
                grad_float, row_TK = grad_TD.float(), row_TK.clamp(max=rows_RD.shape[0] - 1)
                for k in range(num_slots):
                    picked = rows_RD.index_select(0, row_TK[:, k]).float()
                    grad_weights[:, k] = torch.linalg.vecdot(grad_float, picked)
                if valid_TK is not None:
                    grad_weights = grad_weights.masked_fill(~valid_TK, 0)
        return grad_rows, grad_weights, None, None, None, None


def permute(x_TD: torch.Tensor, permutation: Permutation, num_rows: int | None = None) -> torch.Tensor:
    """Rows_RD sorted by destination. `num_rows` keeps only the first rows (those with a destination)."""
    if use_triton(x_TD.device):
        from equipoise.kernels.permute_triton import scatter_rows

        rows = permutation.slot_R.shape[0] if num_rows is None else num_rows
        return scatter_rows(x_TD, permutation.row_TK, permutation.valid_TK, rows)
    token_R = permutation.token_R if num_rows is None else permutation.token_R[:num_rows]
    return _Permute.apply(x_TD, token_R, permutation.row_TK, permutation.valid_TK)


class _RowWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights_TK, slot_R, row_TK, valid_TK):
        ctx.save_for_backward(row_TK, valid_TK)
        return weights_TK.flatten().index_select(0, slot_R)

    @staticmethod
    def backward(ctx, grad_R):
        row_TK, valid_TK = ctx.saved_tensors
        grad_TK = grad_R.index_select(0, row_TK.flatten()).view(row_TK.shape)
        return grad_TK if valid_TK is None else grad_TK.masked_fill(~valid_TK, 0), None, None, None


def weights_of_rows(weights_TK: torch.Tensor, permutation: Permutation) -> torch.Tensor:
    """weights_R: each slot's weight, in the order of the rows that `permute` makes of all slots."""
    return _RowWeights.apply(weights_TK, permutation.slot_R, permutation.row_TK, permutation.valid_TK)


def combine(
    rows_RD: torch.Tensor,
    weights_TK: torch.Tensor | None,
    permutation: Permutation,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y_TD = sum over k of weights_TK (None: of 1) times the slot's row, summed in FP32, as `dtype` (default: the
    rows')."""
    row_TK, valid_TK = permutation.row_TK, permutation.valid_TK
    if use_triton(rows_RD.device):
        from equipoise.kernels.permute_triton import gather_sum

        return gather_sum(rows_RD, row_TK, valid_TK, weights_TK, dtype or rows_RD.dtype)
    slot_R = permutation.slot_R[: rows_RD.shape[0]]
    return _Combine.apply(rows_RD, weights_TK, slot_R, row_TK, valid_TK, dtype or rows_RD.dtype)


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, order_R, inverse_R):
        ctx.save_for_backward(inverse_R)
        return rows_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx, grad_RD):
        (inverse_R,) = ctx.saved_tensors
        return grad_RD.index_select(0, inverse_R), None, None


def reorder(rows_RD: torch.Tensor, order_R: torch.Tensor, inverse_R: torch.Tensor) -> torch.Tensor:
    """rows_RD[order_R] for a permutation whose inverse is known, so that the backward gathers too."""
    if use_triton(rows_RD.device):
        from equipoise.kernels.permute_triton import scatter_rows

        return scatter_rows(rows_RD, inverse_R[:, None], None, order_R.shape[0])
    return _Reorder.apply(rows_RD, order_R, inverse_R)
