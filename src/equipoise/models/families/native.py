"""Our own files: parameters under their own names, experts stacked, `config.json` with the fields of ModelConfig."""

import re
from typing import Any

from equipoise.models.config import ModelConfig
from equipoise.models.families.family import Family


def _read(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in ModelConfig.model_fields}


def _write(config: ModelConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude={"load_from"})


NATIVE = Family(
    model_type="equipoise",
    architecture="MoEForCausalLM",
    read_config=_read,
    write_config=_write,
    expert_layouts=("fused",),
    fp8_pattern=re.compile(r"(?!)"),
)
