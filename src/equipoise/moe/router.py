"""Router: scores, top-k selection and combine weights, all in FP32.

Shapes: T tokens, D features, E experts, K experts per token.
"""

from typing import Literal, NamedTuple

import torch
from torch import nn

from equipoise.config import Config
from equipoise.distributed.collectives import Group
from equipoise.kernels.router_logits import router_logits
from equipoise.kernels.router_weights import router_weights
from equipoise.kernels.select_experts import select_experts
from equipoise.moe.losses import BalanceScope, balance_loss, z_loss
from equipoise.moe.replay import LayerReplay, Replayed, replay_choice
from equipoise.moe.synthetic import SyntheticRouting


class RouterConfig(Config):
    """What a router needs to know; derived from the model configuration in one place (`ModelConfig.router`)."""

    hidden_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    selection_bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    aux_loss: bool = False
    aux_loss_scope: BalanceScope = "micro_batch"
    z_loss: bool = False


class Routing(NamedTuple):
    """A router's decision for one layer and microbatch, about logical experts.

    ids_TK: int32, -1 for padding tokens.
    weights_TK: float32 combine weights; carry the router's gradient.
    counts_E: int32 tokens of each expert on this rank.
    aux_loss, z_loss: float32 scalars, means over this microbatch's tokens; 0 without gradient when switched off.
    replayed: set when recorded ids took the place of the router's choice. `router_counts_E` is then its own choice.
    """

    ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    counts_E: torch.Tensor
    aux_loss: torch.Tensor
    z_loss: torch.Tensor
    replayed: Replayed | None = None

    @property
    def router_counts_E(self) -> torch.Tensor:
        """What a selection bias is updated from: the choice of the router, also where it was not followed."""
        return self.counts_E if self.replayed is None else self.replayed.live_counts_E


class Router(nn.Module):
    """Linear scores and top-k selection, in the form of Qwen3-MoE (softmax) or DeepSeek-V3 (sigmoid, bias, groups).

    The selection bias `e_score_correction_bias` is an FP32 buffer that takes part in the choice and never in the
    weights. It stays FP32 when the module is cast: BF16 would merge hundreds of experts into a few values.
    """

    e_score_correction_bias: torch.Tensor | None

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        bias = torch.zeros(config.num_experts, dtype=torch.float32) if config.selection_bias else None
        self.register_buffer("e_score_correction_bias", bias)
        self.balance_group: Group | None = None
        """Ranks over which the global-batch balance loss sums its counts; set when the model is parallelised."""
        self.synthetic: SyntheticRouting | None = None
        """For measurements only: replaces the router's choice of experts."""

    def _apply(self, fn, recurse=True):
        """Moves the bias with the module (`.to(device)`, `.cuda()`, ...) but keeps its dtype and its values."""
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        if before is not None and after is not None and after.dtype != torch.float32:
            self.e_score_correction_bias = before.to(after.device)
        return self

    def forward(
        self, x_TD: torch.Tensor, valid_T: torch.Tensor | None = None, replay: LayerReplay | None = None
    ) -> Routing:
        """Routes tokens. `valid_T` (bool) marks the real ones; None means all. `replay`: recorded ids to follow."""
        config = self.config
        logits_TE = router_logits(x_TD, self.weight)
        if config.scoring_func == "softmax":
            scores_TE = probs_TE = logits_TE.softmax(-1)
        else:
            scores_TE = logits_TE.sigmoid()
            probs_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
        choice_TE, groups = scores_TE.detach(), (config.n_group, config.topk_group)
        bias_E = self.e_score_correction_bias
        if self.synthetic is not None:
            choice_TE, valid_T = self.synthetic.choose(choice_TE, valid_T)
            bias_E, groups = None, (1, 1)
        ids_TK, counts_E = select_experts(choice_TE, bias_E, valid_T, config.num_experts_per_tok, *groups)
        router_counts_E, replayed = counts_E, None
        if replay is not None:
            ids_TK, counts_E, replayed = replay_choice(replay, ids_TK, counts_E)
        weights_TK = router_weights(
            logits_TE,
            scores_TE,
            ids_TK,
            config.scoring_func == "softmax",
            config.norm_topk_prob,
            config.routed_scaling_factor,
        )
        zero = logits_TE.new_zeros(())
        aux = zero
        if config.aux_loss:
            group = self.balance_group if config.aux_loss_scope == "global_batch" else None
            aux = balance_loss(probs_TE, router_counts_E, valid_T, config.num_experts_per_tok, group)
        z = z_loss(logits_TE, valid_T) if config.z_loss else zero
        return Routing(ids_TK, weights_TK, counts_E, aux, z, replayed)
