"""Qwen3-MoE."""

import re
from typing import Any

from equipoise.models.config import ModelConfig
from equipoise.models.families.family import Family, read_fields, rope_parameters

_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "mlp_only_layers",
    "decoder_sparse_step",
    "router_aux_loss_coef",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "tie_word_embeddings",
    "initializer_range",
)
_DEFAULTS = {
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


def _read(hf: dict[str, Any]) -> dict[str, Any]:
    if hf.get("use_sliding_window"):
        raise ValueError("use_sliding_window is true; sliding-window attention is not supported")
    values = read_fields(hf, {name: name for name in _FIELDS}, _DEFAULTS, max_positions=32768)
    if hf.get("num_local_experts") is not None:
        values["num_experts"] = hf["num_local_experts"]
    if "head_dim" not in values:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    values["mlp_only_layers"] = tuple(values.get("mlp_only_layers", ()))
    return values


def _write(config: ModelConfig) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in _FIELDS}
    return values | {"mlp_only_layers": list(config.mlp_only_layers), "rope_parameters": rope_parameters(config)}


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read_config=_read,
    write_config=_write,
    expert_layouts=("per_expert", "fused"),
    fp8_pattern=re.compile(r"(self_attn\.[qkvo]|mlp\.(experts\.\d+\.)?(gate|up|down))_proj\.weight$"),
)
