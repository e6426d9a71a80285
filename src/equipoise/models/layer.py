"""A decoder layer and its feed-forward network. Parameter names are those of transformers' Qwen3-MoE.

Shapes: B sequences, S tokens, D features.
"""

import torch
import torch.nn.functional as F
from torch import nn

from equipoise.dispatch import build_dispatcher
from equipoise.models.attention import AttentionMask, build_attention
from equipoise.models.config import ModelConfig
from equipoise.models.recompute import Recompute, recomputed
from equipoise.moe.experts import ExpertKernel, Experts
from equipoise.moe.layer import MoELayer
from equipoise.moe.replay import LayerReplay
from equipoise.moe.router import Router, Routing


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
        self.self_attn = build_attention(config)
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
        replay: LayerReplay | None = None,
    ) -> tuple[torch.Tensor, Routing | None]:
        """`replay`: recorded experts of this layer, to be followed."""
        return recomputed(self.recompute, self._run, x_BSD, rotary, mask, valid_BS, microbatch, replay)

    def _run(
        self, x_BSD, rotary, mask, valid_BS, microbatch: int, replay: LayerReplay | None = None
    ) -> tuple[torch.Tensor, Routing | None]:
        balancing = self.mlp.balancing if isinstance(self.mlp, MoELayer) else None
        entered = None
        if balancing is not None:  # before attention: its backward is then the last
            entered = balancing.enter(microbatch, replay, valid_BS)
        x_BSD, normed = self.attend(x_BSD, rotary, mask)
        if self.is_moe:
            y_BSD, routing = self.mlp(normed, valid_BS, microbatch, entered, replay)
            return x_BSD + y_BSD, routing
        return x_BSD + self.mlp(normed), None

    def attend(self, x_BSD, rotary, mask) -> tuple[torch.Tensor, torch.Tensor]:
        """The first half: the residual stream after attention, and what its norm makes of it."""
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rotary, mask)
        return x_BSD, self.post_attention_layernorm(x_BSD)
