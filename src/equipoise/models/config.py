"""Architecture of a decoder-only MoE language model, with Hugging Face field names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from equipoise.config import Config, divisors
from equipoise.models.rotary import YarnConfig
from equipoise.moe.losses import BalanceScope
from equipoise.moe.router import RouterConfig

TRAINING_ONLY = {
    "bias_update_speed",
    "initializer_range",
    "load_from",
    "max_position_embeddings",
    "mtp_loss_coef",
    "router_aux_loss_coef",
    "router_aux_loss_scope",
    "router_z_loss_coef",
}
"""Settings of a model that say how it is trained, not what it computes."""

OF_WEIGHTS = {
    "attention_bias",
    "decoder_sparse_step",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "kv_lora_rank",
    "mlp_only_layers",
    "moe_intermediate_size",
    "n_shared_experts",
    "num_attention_heads",
    "num_experts",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_nextn_predict_layers",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "selection_bias",
    "tie_word_embeddings",
    "v_head_dim",
    "vocab_size",
}
"""Settings of a model that decide which tensors it has, and their shapes."""


class ModelConfig(Config):
    """Qwen3-MoE architecture; router (sigmoid, bias, groups, shared experts) and attention (latent) can also be
    DeepSeek-V3's."""

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
    q_lora_rank: PositiveInt | None = None
    """Latent attention: width of the queries' low-rank projection; none projects them at once."""
    kv_lora_rank: PositiveInt | None = None
    """Width of the latent vector that keys and values are made from (DeepSeek-V3's attention, without query/key norm);
    none has grouped-query attention. With it num_key_value_heads is num_attention_heads and head_dim is
    qk_rope_head_dim."""
    qk_nope_head_dim: PositiveInt = 64
    """Latent attention: features per head of queries and keys that carry no position."""
    qk_rope_head_dim: PositiveInt = 32
    """Latent attention: features per head of queries and keys that carry the rotary position; even."""
    v_head_dim: PositiveInt = 64
    """Latent attention: features per head of the values."""
    rope_interleave: bool = False
    """Latent attention: whether neighbouring features form the rotated pairs (DeepSeek-V3), not halves."""
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
    rope_scaling: YarnConfig | None = None
    """Stretches rotary positions by YaRN; none leaves them."""
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
    load_from: Path | None = None
    """Folder of a Hugging Face model, or of one that `equipoise convert` wrote, whose weights a new run starts from.
    The model's other settings are read from it as well; those that are given may not contradict it."""

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
        problems += self._attention_problems()
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

    def _attention_problems(self) -> list[str]:
        if self.kv_lora_rank is None:
            latent_only = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave")
            return [
                f"{name} is {getattr(self, name)}, which only latent attention has: set kv_lora_rank, or leave it out"
                for name in latent_only
                if getattr(self, name) != type(self).model_fields[name].default
            ]
        wanted = {"num_key_value_heads": "num_attention_heads", "head_dim": "qk_rope_head_dim"}
        return [
            f"{name} is {getattr(self, name)}, but with kv_lora_rank it has to be {other}, {getattr(self, other)}"
            for name, other in wanted.items()
            if getattr(self, name) != getattr(self, other)
        ]

    @property
    def qk_head_dim(self) -> int:
        """Features of a query or key per head."""
        return self.head_dim if self.kv_lora_rank is None else self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def value_head_dim(self) -> int:
        """Features of a value per head."""
        return self.head_dim if self.kv_lora_rank is None else self.v_head_dim

    @property
    def attention_parameters(self) -> int:
        """Weights of the projections of one layer's attention, without norms and biases."""
        hidden, heads = self.hidden_size, self.num_attention_heads
        if self.kv_lora_rank is None:
            return 2 * hidden * self.head_dim * (heads + self.num_key_value_heads)
        rank, queries = self.q_lora_rank, heads * self.qk_head_dim
        return (
            (hidden * queries if rank is None else rank * (hidden + queries))
            + hidden * (self.kv_lora_rank + self.qk_rope_head_dim)
            + self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
            + heads * self.v_head_dim * hidden
        )

    @property
    def num_moe_layers(self) -> int:
        """How many `moe_layers` there are; without listing them, since there may be any number."""
        main, step = self.num_hidden_layers, self.decoder_sparse_step
        dense = set(self.mlp_only_layers)
        sparse = main // step - sum((i + 1) % step == 0 for i in dense)
        last_is_sparse = main % step == 0 and main - 1 not in dense
        return sparse + (self.num_nextn_predict_layers if last_is_sparse else 0)

    @property
    def matrix_parameters(self) -> int:
        """Weights of all matrices of the model, without norms and biases."""
        hidden, moe_layers, ahead = self.hidden_size, self.num_moe_layers, self.num_nextn_predict_layers
        expert = 3 * hidden * self.moe_intermediate_size
        moe = (self.num_experts + self.n_shared_experts) * expert + self.num_experts * hidden
        dense = 3 * hidden * self.intermediate_size
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * hidden
        layers = self.num_layers * self.attention_parameters + moe_layers * moe + (self.num_layers - moe_layers) * dense
        return embeddings + layers + ahead * 2 * hidden**2

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
        """Reads a `config.json` of a family that is native here (`models/families`).

        Fields that are absent take the family's own default, not ours. Both spellings of the rotary base are read
        (`rope_theta`, and `rope_parameters` of transformers 5).

        Raises:
            ValueError: another model type, or a feature that changes the mathematics and is not built here.
        """
        from equipoise.models.families import family_of_type

        return cls(**family_of_type(hf.get("model_type")).read_config(hf))


def model_changes(saved: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that decide what a model computes, by name, where the saved value and the present one differ.

    Both are a `ModelConfig` as JSON. What was saved by an older version may lack settings.
    """
    return {
        name: (saved[name], value)
        for name, value in present.items()
        if name in saved and saved[name] != value and name not in TRAINING_ONLY
    }


def describe_changes(changes: Mapping[str, tuple[Any, Any]], where: str = "the checkpoint") -> str:
    """What `model_changes` found, for messages; `where` is what has the saved values."""
    return "; ".join(f"model.{name}: {where} has {old}, this run has {new}" for name, (old, new) in changes.items())
