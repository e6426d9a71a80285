"""The decoder-only MoE language model. Parameter names are those of transformers' Qwen3-MoE.

Shapes: B sequences, S tokens, D features, V vocabulary, T = B * S.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from equipoise.dispatch import build_dispatcher
from equipoise.models.attention import Attention, AttentionMask, document_mask, rotary_tables
from equipoise.models.config import ModelConfig
from equipoise.models.recompute import Recompute, recompute_context
from equipoise.moe.experts import ExpertKernel, Experts
from equipoise.moe.layer import MoELayer
from equipoise.moe.router import Router, Routing

IGNORED_LABEL = -100
"""Label of a position that takes no part in the loss (as in transformers)."""

_LOSS_CHUNK_ELEMENTS = 1 << 26
"""Logits held at once while computing the loss: 64 M elements, 256 MiB in FP32."""


class ModelOutput(NamedTuple):
    """Results of a forward.

    loss_sum: float32 scalar, cross-entropy summed over the valid labels (nats); None without labels.
    logits: [B, S, V]; None when labels were given (they are never held whole then).
    routings: one entry per MoE layer, in layer order.
    """

    loss_sum: torch.Tensor | None
    logits: torch.Tensor | None
    routings: list[Routing]


class FeedForward(nn.Module):
    """SwiGLU feed-forward network: a dense layer, or the shared experts of an MoE layer."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def build_moe_layer(config: ModelConfig, expert_kernel: ExpertKernel) -> MoELayer:
    """An MoE layer with all experts here and the local dispatcher; expert parallelism replaces both later."""
    shared = None
    if config.n_shared_experts:
        shared = FeedForward(config.hidden_size, config.n_shared_experts * config.moe_intermediate_size)
    return MoELayer(
        Router(config.router),
        Experts(config.num_experts, config.hidden_size, config.moe_intermediate_size, expert_kernel),
        shared,
        build_dispatcher("local", config.num_experts, None),
    )


class DecoderLayer(nn.Module):
    """Attention and feed-forward with pre-norm residuals. Returns the routing as well when the layer is MoE."""

    def __init__(self, config: ModelConfig, index: int, expert_kernel: ExpertKernel) -> None:
        super().__init__()
        self.is_moe = index in config.moe_layers
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp: nn.Module
        if self.is_moe:
            self.mlp = build_moe_layer(config, expert_kernel)
        else:
            self.mlp = FeedForward(config.hidden_size, config.intermediate_size)
        self.recompute: Recompute = "none"

    def forward(
        self,
        x_BSD: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        mask: AttentionMask,
        valid_BS: torch.Tensor | None,
        microbatch: int = 0,
    ) -> tuple[torch.Tensor, Routing | None]:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self._run(x_BSD, rotary, mask, valid_BS, microbatch)
        return checkpoint(
            self._run,
            x_BSD,
            rotary,
            mask,
            valid_BS,
            microbatch,
            use_reentrant=False,
            preserve_rng_state=False,  # nothing here draws random numbers
            context_fn=recompute_context(self.recompute),
        )

    def _run(self, x_BSD, rotary, mask, valid_BS, microbatch: int) -> tuple[torch.Tensor, Routing | None]:
        balancing = self.mlp.balancing if isinstance(self.mlp, MoELayer) else None
        entered = None if balancing is None else balancing.enter()  # before attention: its backward is then the last
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rotary, mask)
        normed = self.post_attention_layernorm(x_BSD)
        if self.is_moe:
            y_BSD, routing = self.mlp(normed, valid_BS, microbatch, entered)
            return x_BSD + y_BSD, routing
        return x_BSD + self.mlp(normed), None


class Decoder(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: ModelConfig, expert_kernel: ExpertKernel = "auto") -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i, expert_kernel) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        input_ids_BS: torch.Tensor,
        position_ids_BS: torch.Tensor | None,
        document_ids_BS: torch.Tensor | None,
        valid_BS: torch.Tensor | None,
        microbatch: int = 0,
    ) -> tuple[torch.Tensor, list[Routing]]:
        x_BSD = self.embed_tokens(input_ids_BS)
        if position_ids_BS is None:
            position_ids_BS = torch.arange(input_ids_BS.shape[1], device=input_ids_BS.device)[None]
        rotary = rotary_tables(position_ids_BS, self.config.head_dim, self.config.rope_theta, x_BSD.dtype)
        mask = document_mask(document_ids_BS)
        routings = []
        for layer in self.layers:
            x_BSD, routing = layer(x_BSD, rotary, mask, valid_BS, microbatch)
            if routing is not None:
                routings.append(routing)
        return self.norm(x_BSD), routings


class LMHead(nn.Linear):
    """Output projection, with a loss that never holds more than a bounded number of logits."""

    def forward(self, x_BSD: torch.Tensor, labels_BS: torch.Tensor | None = None) -> torch.Tensor:
        """Logits without labels; with labels the summed cross-entropy in FP32."""
        if labels_BS is None:
            return super().forward(x_BSD)
        x_TD, labels_T = x_BSD.flatten(0, 1), labels_BS.flatten()
        chunk = max(1, _LOSS_CHUNK_ELEMENTS // self.out_features)
        if x_TD.shape[0] <= chunk:
            return self._loss_sum(x_TD, labels_T)
        parts = zip(x_TD.split(chunk), labels_T.split(chunk))
        losses = [
            checkpoint(self._loss_sum, x, labels, use_reentrant=False, preserve_rng_state=False) for x, labels in parts
        ]
        return torch.stack(losses).sum()

    def _loss_sum(self, x_TD: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
        logits = F.linear(x_TD, self.weight).float()
        return F.cross_entropy(logits, labels_T, ignore_index=IGNORED_LABEL, reduction="sum")


class MoEForCausalLM(nn.Module):
    """The whole language model; `model.*` and `lm_head.weight` as in transformers."""

    def __init__(self, config: ModelConfig, expert_kernel: ExpertKernel = "auto") -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, expert_kernel)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids_BS: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        position_ids_BS: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
        valid_BS: torch.Tensor | None = None,
        microbatch: int = 0,
    ) -> ModelOutput:
        """Runs the model.

        Args:
            input_ids_BS: int64 token ids.
            labels_BS: int64 next-token labels, already shifted; `IGNORED_LABEL` where there is none.
            position_ids_BS: int64 rotary positions; None counts from 0 in each sequence.
            document_ids_BS: integers that differ between packed documents; None for plain causal attention.
            valid_BS: bool, False for padding tokens, which no expert sees and no statistic counts; None means all.
            microbatch: number that tells this forward from others whose backward is still to come.
        """
        hidden_BSD, routings = self.model(input_ids_BS, position_ids_BS, document_ids_BS, valid_BS, microbatch)
        if labels_BS is None:
            return ModelOutput(None, self.lm_head(hidden_BSD), routings)
        return ModelOutput(self.lm_head(hidden_BSD, labels_BS), None, routings)
