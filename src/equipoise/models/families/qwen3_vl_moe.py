"""Qwen3-VL-MoE, its language model alone: read as a Qwen3-MoE, whose `config.json` it is written with.

On text, the three axes of its rotary positions agree, which makes them Qwen3-MoE's.
"""

import re
from typing import Any

from equipoise.models.config import ModelConfig
from equipoise.models.families import qwen3_moe
from equipoise.models.families.family import Family


def _read(hf: dict[str, Any]) -> dict[str, Any]:
    text = dict(hf.get("text_config") or {})
    text["tie_word_embeddings"] = bool(hf.get("tie_word_embeddings"))  # that of the whole counts
    return qwen3_moe.FAMILY.read_config(text)


def _write(config: ModelConfig) -> dict[str, Any]:
    values = qwen3_moe.FAMILY.write_config(config)
    return {"tie_word_embeddings": values.pop("tie_word_embeddings"), "text_config": values}


FAMILY = Family(
    model_type="qwen3_vl_moe",
    architecture="Qwen3VLMoeForConditionalGeneration",
    read_config=_read,
    write_config=_write,
    expert_layouts=("transposed",),  # as released; transformers writes the fused form, which is refused by its shapes
    fp8_pattern=re.compile(r"(?!)"),
    ignored_pattern=re.compile(r"^model\.visual\."),
    prefix=("model.", "model.language_model."),
)
