"""Architecture of a decoder-only MoE language model, with Hugging Face field names."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from equipoise.config import Config, divisors
from equipoise.moe.losses import BalanceScope
from equipoise.moe.router import RouterConfig

TRAINING_ONLY = {
    "bias_update_speed",
    "initializer_range",
    "max_position_embeddings",
    "mtp_loss_coef",
    "router_aux_loss_coef",
    "router_aux_loss_scope",
    "router_z_loss_coef",
}
"""Settings of a model that say how it is trained, not what it computes."""


class ModelConfig(Config):
    """Qwen3-MoE architecture; the router can also be DeepSeek-V3's (sigmoid, bias, groups, shared experts)."""

    vocab_size: PositiveInt = 272
    """Rows of the embedding. At least the tokenizer's vocabulary; the byte tokenizer needs 257."""
    hidden_size: PositiveInt = 256
    """Width of the residual stream."""
    num_hidden_layers: PositiveInt = 4
    """Decoder layers."""
    num_attention_heads: PositiveInt = 4
    """Query heads."""
    num_key_value_heads: PositiveInt = 2
    """Key and value heads; divides num_attention_heads (grouped-query attention)."""
    head_dim: PositiveInt = 64
    """Features per head; even."""
    intermediate_size: PositiveInt = 512
    """Inner width of dense feed-forward layers."""
    moe_intermediate_size: PositiveInt = 256
    """Inner width of one expert."""
    num_experts: PositiveInt = 8
    """Routed (logical) experts per MoE layer."""
    num_experts_per_tok: PositiveInt = 2
    """Experts that each token is sent to (top-k); at most num_experts."""
    n_shared_experts: int = Field(0, ge=0)
    """Experts that every token passes through, fused into one feed-forward of this many times moe_intermediate_size."""
    norm_topk_prob: bool = False
    """Whether the top-k weights are scaled to sum to 1. Released Qwen3-MoE weights say true; the family's default is
    false."""
    mlp_only_layers: tuple[int, ...] = ()
    """Indices of layers that are dense."""
    decoder_sparse_step: PositiveInt = 1
    """Every n-th layer is MoE (layers n-1, 2n-1, ...), the others are dense."""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """Router scores: softmax over experts (Qwen3-MoE) or independent sigmoids (DeepSeek-V3)."""
    selection_bias: bool = False
    """Adds a per-expert FP32 bias to the scores for the selection only (aux-loss-free balancing)."""
    bias_update_speed: float = Field(1e-3, ge=0)
    """Step of the selection bias after each optimizer step, from the exact global counts."""
    n_group: PositiveInt = 1
    """Expert groups for group-limited routing; divides num_experts."""
    topk_group: PositiveInt = 1
    """Groups that a token may choose from; their experts must number at least num_experts_per_tok."""
    routed_scaling_factor: PositiveFloat = 1.0
    """Factor on the routed experts' weights."""
    router_aux_loss_coef: float = Field(0.001, ge=0)
    """Weight of the load-balance loss (mean over MoE layers); 0 switches it off."""
    router_aux_loss_scope: BalanceScope = "micro_batch"
    """Whether the balance loss counts tokens of this rank's microbatch or of the same microbatch on all ranks."""
    router_z_loss_coef: float = Field(0.0, ge=0)
    """Weight of the router z-loss (mean over MoE layers); 0 switches it off."""
    hidden_act: Literal["silu"] = "silu"
    """Activation of the gated feed-forward layers."""
    rms_norm_eps: PositiveFloat = 1e-6
    """Added to the variance in RMSNorm."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position frequencies."""
    max_position_embeddings: PositiveInt = 32768
    """Longest sequence that the model is meant for; train.sequence_length may not exceed it."""
    attention_bias: bool = False
    """Whether the attention projections have a bias."""
    tie_word_embeddings: bool = False
    """Whether the output projection is the embedding."""
    num_nextn_predict_layers: int = Field(0, ge=0)
    """Multi-token prediction (DeepSeek-V3): layers behind the others, each of which predicts one more token ahead while
    training; 0 switches it off."""
    mtp_loss_coef: PositiveFloat = 0.3
    """Weight of the multi-token-prediction loss (mean over its layers). DeepSeek-V3's lambda: 0.3 for 10 T tokens, then
    0.1 (technical report, section 4.2)."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        problems = []
        if self.num_experts_per_tok > self.num_experts:
            problems.append(
                f"num_experts_per_tok is {self.num_experts_per_tok} but there are {self.num_experts} experts "
                f"(num_experts): choose 1 to {self.num_experts}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_key_value_heads is {self.num_key_value_heads}, which does not divide num_attention_heads "
                f"{self.num_attention_heads}: choose one of {divisors(self.num_attention_heads)}"
            )
        if self.head_dim % 2:
            problems.append(f"head_dim is {self.head_dim}; rotary embeddings need an even number")
        if self.num_experts % self.n_group:
            problems.append(
                f"n_group is {self.n_group}, which does not divide num_experts {self.num_experts}: "
                f"choose one of {divisors(self.num_experts)}"
            )
        elif self.topk_group > self.n_group:
            problems.append(
                f"topk_group is {self.topk_group} but n_group is {self.n_group}: choose 1 to {self.n_group}"
            )
        elif self.topk_group * (self.num_experts // self.n_group) < self.num_experts_per_tok <= self.num_experts:
            problems.append(
                f"topk_group {self.topk_group} of n_group {self.n_group} leaves "
                f"{self.topk_group * (self.num_experts // self.n_group)} experts to choose from, fewer than "
                f"num_experts_per_tok {self.num_experts_per_tok}: raise topk_group"
            )
        bad_layers = [i for i in self.mlp_only_layers if not 0 <= i < self.num_hidden_layers]
        if bad_layers:
            problems.append(
                f"mlp_only_layers names layers {bad_layers}; layers are 0 to {self.num_hidden_layers - 1} "
                "(num_hidden_layers)"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the MoE layers, by the rule of transformers' Qwen3-MoE; those that predict further tokens are of
        the kind of the last layer before them."""
        main = self.num_hidden_layers
        sparse = [i for i in range(main) if i not in self.mlp_only_layers and (i + 1) % self.decoder_sparse_step == 0]
        return (*sparse, *(range(main, self.num_layers) if main - 1 in sparse else ()))

    @property
    def num_layers(self) -> int:
        """Decoder layers with those that predict further tokens, which come last."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @property
    def router(self) -> RouterConfig:
        """The router's share of this configuration."""
        return RouterConfig(
            hidden_size=self.hidden_size,
            num_experts=self.num_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            norm_topk_prob=self.norm_topk_prob,
            scoring_func=self.scoring_func,
            selection_bias=self.selection_bias,
            n_group=self.n_group,
            topk_group=self.topk_group,
            routed_scaling_factor=self.routed_scaling_factor,
            aux_loss=self.router_aux_loss_coef > 0,
            aux_loss_scope=self.router_aux_loss_scope,
            z_loss=self.router_z_loss_coef > 0,
        )

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> Self:
        """Reads a `config.json` of model_type `qwen3_moe`.

        Fields that are absent take the family's own default, not ours. Both spellings of the rotary base are read
        (`rope_theta`, and `rope_parameters` of transformers 5).

        Raises:
            ValueError: another model type, or a feature that changes the mathematics and is not built here.
        """
        if hf.get("model_type") != "qwen3_moe":
            raise ValueError(f"model_type {hf.get('model_type')!r} cannot be read: only 'qwen3_moe' is supported")
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise ValueError(f"rotary embedding type {rope_type!r} is not supported: only 'default'")
        if hf.get("use_sliding_window"):
            raise ValueError("use_sliding_window is true; sliding-window attention is not supported")
        values = _QWEN3_MOE_DEFAULTS | {k: v for k, v in hf.items() if k in cls.model_fields and v is not None}
        if "num_local_experts" in hf:
            values["num_experts"] = hf["num_local_experts"]
        if "rope_theta" in rope:
            values["rope_theta"] = rope["rope_theta"]
        if hf.get("head_dim") is None:
            values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
        return cls(**values)


_QWEN3_MOE_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
    "rope_theta": 10000.0,
}
"""Defaults of transformers' Qwen3MoeConfig where they differ from ours or matter for reading."""
