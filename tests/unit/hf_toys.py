"""Toy models of the native families, made by transformers, and the folders that it saves."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)


def hf_model(**changes) -> Qwen3MoeForCausalLM:
    values = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "initializer_range": 0.2,
        "use_cache": False,
    }
    torch.manual_seed(0)
    return enlivened(Qwen3MoeForCausalLM(Qwen3MoeConfig(**(values | changes))))


def deepseek_model(**changes) -> DeepseekV3ForCausalLM:
    values = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 20,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "initializer_range": 0.2,
        "use_cache": False,
    }
    torch.manual_seed(0)
    return enlivened(DeepseekV3ForCausalLM(DeepseekV3Config(**(values | changes))))


def save_vision_language_model(folder: Path) -> Qwen3VLMoeForConditionalGeneration:
    """A toy Qwen3-VL-MoE in the form of the released files, where experts are transposed; 2 * I is D."""
    text = {
        "vocab_size": 97,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "initializer_range": 0.2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e5,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }
    torch.manual_seed(0)
    model = enlivened(Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision)))
    model.config.save_pretrained(folder)
    tensors = {}
    for key, value in model.state_dict().items():
        tensors[key] = value.transpose(1, 2).contiguous() if "mlp.experts." in key else value.clone()
    save_file(tensors, folder / "model.safetensors")
    return model


def enlivened(model):
    """Norms and biases start as constants: makes them count."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.dim() == 1 and "inv_freq" not in name:
            torch.nn.init.normal_(tensor, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files."""
    return {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}


def assert_same_tensors(got: Path, want: Path) -> None:
    """Byte for byte: names, dtypes, shapes and values."""
    a, b = tensors_of(got), tensors_of(want)
    assert a.keys() == b.keys()
    for key in b:
        assert a[key].dtype == b[key].dtype, key
        assert a[key].shape == b[key].shape, key
        assert torch.equal(a[key].view(torch.uint8), b[key].view(torch.uint8)), key
