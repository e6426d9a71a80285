"""DeepEP's interface as the adapter uses it, over plain collectives: tokens once per rank, sums over ranks.

Shapes: T tokens, K slots, E experts, P ranks.
"""

from typing import Any

import torch
import torch.distributed as dist


class Config:
    def get_nvl_buffer_size_hint(self, row_bytes: int, num_ranks: int) -> int:
        return row_bytes * num_ranks

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class Buffer:
    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        assert num_nvl_bytes > 0
        self.group, self.size, self.rank = group, group.size(), dist.get_rank(group)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple:
        assert topk_idx.dtype == torch.int64
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        rank_TK = torch.where(topk_idx >= 0, topk_idx // (num_experts // self.size), -1)
        is_in_rank = torch.stack([(rank_TK == rank).any(1) for rank in range(self.size)], 1)
        return is_in_rank.sum(0), None, per_expert, is_in_rank, None

    def _move(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Part i to rank i; what came from each."""
        received: list[Any] = [None] * self.size
        everything: list[Any] = [None] * self.size
        dist.all_gather_object(everything, [part.detach() for part in parts], group=self.group)
        for source, theirs in enumerate(everything):
            received[source] = theirs[self.rank]
        return received

    def dispatch(self, x, handle=None, topk_idx=None, topk_weights=None, num_tokens_per_rank=None,
                 num_tokens_per_rdma_rank=None, is_token_in_rank=None, num_tokens_per_expert=None):  # fmt: skip
        if handle is not None:
            is_in_rank, _ = handle
            parts = self._move([x[is_in_rank[:, rank]] for rank in range(self.size)])
            return torch.cat(parts), None, None, [], handle, None
        assert topk_weights.dtype == torch.float32
        local = num_tokens_per_expert.numel() // self.size
        parts_x, parts_ids, parts_weights = [], [], []
        for rank in range(self.size):
            chosen = is_token_in_rank[:, rank]
            ids = topk_idx[chosen] - rank * local
            is_here = (topk_idx[chosen] >= 0) & (ids >= 0) & (ids < local)
            parts_x.append(x[chosen])
            parts_ids.append(torch.where(is_here, ids, -1))
            parts_weights.append(torch.where(is_here, topk_weights[chosen], 0))
        arrived = self._move(parts_x)
        handle = is_token_in_rank, [len(part) for part in arrived]
        ids, weights = torch.cat(self._move(parts_ids)), torch.cat(self._move(parts_weights))
        counts = torch.bincount(ids[ids >= 0], minlength=local).tolist()
        return torch.cat(arrived), ids, weights, counts, handle, None

    def combine(self, x, handle, topk_weights=None):
        is_in_rank, counts = handle
        total, weights = x.new_zeros(len(is_in_rank), x.shape[1], dtype=torch.float32), None
        for rank, part in enumerate(self._move(list(x.split(counts)))):
            total[is_in_rank[:, rank]] += part.float()
        if topk_weights is not None:
            weights = topk_weights.new_zeros(len(is_in_rank), topk_weights.shape[1])
            for rank, part in enumerate(self._move(list(topk_weights.split(counts)))):
                weights[is_in_rank[:, rank]] += part
        return total.to(x.dtype), weights, None
