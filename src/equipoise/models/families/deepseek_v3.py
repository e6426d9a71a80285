"""DeepSeek-V3 (and V3.1, R1): latent attention, sigmoid router with bias and groups, shared experts, MTP layers."""

import re
from typing import Any

from equipoise.models.config import ModelConfig
from equipoise.models.families.family import Family, read_fields, rope_parameters

_SAME = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_interleave",
    "n_shared_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "num_nextn_predict_layers",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "tie_word_embeddings",
    "initializer_range",
)
_NAMES = {name: name for name in _SAME} | {"num_experts": "n_routed_experts"}
_DEFAULTS = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "num_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000.0,
}
_ROUTER = {"scoring_func": "sigmoid", "selection_bias": True, "router_aux_loss_coef": 0.0}
_ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1}
"""Fields of the released config that nothing else can be said for here."""


def _read(hf: dict[str, Any]) -> dict[str, Any]:
    for name, only in _ONLY.items():
        if name in hf and hf[name] is not None and hf[name] != only:
            raise ValueError(f"{name} is {hf[name]!r}; only {only!r} is supported for deepseek_v3")
    values = read_fields(hf, _NAMES, _DEFAULTS, max_positions=4096) | _ROUTER
    if hf.get("num_local_experts") is not None:
        values["num_experts"] = hf["num_local_experts"]
    if "q_lora_rank" in hf:
        values["q_lora_rank"] = hf["q_lora_rank"]  # null is a value: one full projection
    if hf.get("num_mtp_layers") is not None:
        values["num_nextn_predict_layers"] = hf["num_mtp_layers"]
    values["num_key_value_heads"] = values["num_attention_heads"]
    values["head_dim"] = values["qk_rope_head_dim"]
    dense = hf.get("first_k_dense_replace")
    values["mlp_only_layers"] = tuple(range(min(3 if dense is None else dense, values["num_hidden_layers"])))
    return values


def _write(config: ModelConfig) -> dict[str, Any]:
    values = {theirs: getattr(config, ours) for ours, theirs in _NAMES.items()}
    dense = 0
    while dense in config.mlp_only_layers:
        dense += 1
    return values | {"first_k_dense_replace": dense, "rope_parameters": rope_parameters(config)}


def _copies(config: ModelConfig) -> dict[str, str]:
    """Each layer that predicts further tokens repeats the embedding and the output head."""
    copies = {}
    for layer in range(config.num_hidden_layers, config.num_layers):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        copies[f"model.layers.{layer}.shared_head.head.weight"] = head
    return copies


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read_config=_read,
    write_config=_write,
    expert_layouts=("per_expert", "fused"),
    fp8_pattern=re.compile(
        r"(self_attn\.(q|q_a|q_b|kv_b|o)_proj|kv_a_proj_with_mqa"
        r"|mlp\.(experts\.\d+\.|shared_experts\.)?(gate|up|down)_proj)\.weight$"
    ),
    copies=_copies,
)
