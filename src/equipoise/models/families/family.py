"""What a file of a family declares: how its `config.json` and its tensors map to ours.

Our parameter names are those that transformers gives the modules of these families, so only the experts
and what begins with a family's `prefix` are called otherwise in its files.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from equipoise.models.config import TRAINING_ONLY, ModelConfig

ExpertLayout = Literal["per_expert", "fused", "transposed"]
"""How files hold the experts of a layer; E experts, D hidden and I expert features.

per_expert: `experts.<e>.gate_proj.weight` and `up_proj` [I, D], `down_proj` [D, I].
fused:      `experts.gate_up_proj` [E, 2 * I, D] with the gate's rows first, `experts.down_proj` [E, D, I]; as ours.
transposed: the names of fused, with [E, D, 2 * I] and [E, I, D] (Qwen3-VL-MoE).

fused and transposed are told apart by the family alone: shapes may agree.
"""


@dataclass(frozen=True)
class Family:
    """A model type of Hugging Face."""

    model_type: str
    architecture: str
    """Class in transformers, as `config.json` names it."""
    read_config: Callable[[dict[str, Any]], dict[str, Any]]
    """Values of ModelConfig from a parsed `config.json`; ValueError names what is not built here."""
    write_config: Callable[[ModelConfig], dict[str, Any]]
    """Fields of `config.json` from a ModelConfig; drops what the family has no place for."""
    expert_layouts: tuple[ExpertLayout, ...]
    """Layouts in which its files come. The first is written."""
    fp8_pattern: re.Pattern[str]
    """Names of the matrices that FP8 checkpoints hold in FP8."""
    int4_pattern: re.Pattern[str] = re.compile(r"mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$")
    """Names of the matrices that are written in INT4: routed experts, which are nearly all of a model."""
    fp32_pattern: re.Pattern[str] = re.compile(r"e_score_correction_bias$")
    """Names of tensors that stay FP32 whatever dtype the others are written in."""
    ignored_pattern: re.Pattern[str] = re.compile(r"rotary_emb\.inv_freq$")
    """Names of tensors in files that are no weights of the model."""
    prefix: tuple[str, str] = ("", "")
    """What our names begin with, and what stands for it in files."""
    copies: Callable[[ModelConfig], Mapping[str, str]] = field(default=lambda config: {})
    """Tensors of files that repeat another: name of the copy to name of the original. Written; may be absent."""

    def key(self, name: str) -> str:
        """A name in files, from what it would be without `prefix`."""
        ours, theirs = self.prefix
        return theirs + name.removeprefix(ours) if name.startswith(ours) else name


def misfits(family: Family, config: ModelConfig) -> list[str]:
    """Settings that change what the model computes and that the family's `config.json` cannot express."""
    try:
        seen = ModelConfig(**family.read_config(family.write_config(config)))
    except ValueError as error:
        return [str(error)]
    ours, theirs = config.model_dump(), seen.model_dump()
    return [
        f"{name} is {value} (the family has {theirs[name]})"
        for name, value in ours.items()
        if name not in TRAINING_ONLY and theirs[name] != value
    ]


def read_fields(
    hf: Mapping[str, Any], names: Mapping[str, str], defaults: Mapping[str, Any], max_positions: int
) -> dict[str, Any]:
    """Values of our settings from a `config.json`: those `names` (theirs by ours), and the rotary embedding.

    Fields that are absent or null take the family's default.
    """
    values = dict(defaults) | {ours: hf[theirs] for ours, theirs in names.items() if hf.get(theirs) is not None}
    values.setdefault("max_position_embeddings", max_positions)
    return values | _rotary(hf, values["max_position_embeddings"])


def _rotary(hf: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or hf.get("rope_theta")
    kind = rope.pop("rope_type", None) or rope.pop("type", "default")
    rope.pop("type", None)
    values: dict[str, Any] = {} if theta is None else {"rope_theta": float(theta)}
    if kind == "default":
        return values
    if kind != "yarn":
        raise ValueError(f"rotary embedding type {kind!r} is not supported: only 'default' and 'yarn'")
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is set; rotary embeddings of part of the features are not supported")
    rope.setdefault("original_max_position_embeddings", max_positions)
    whole = {"original_max_position_embeddings", "truncate"}
    yarn = {name: v if name in whole or v is None else float(v) for name, v in rope.items()}
    for name in ("beta_fast", "beta_slow"):
        if not yarn.get(name):  # null and 0 mean the default there
            yarn.pop(name, None)
    if yarn.get("factor") is None:
        raise ValueError("the rotary embedding is of type 'yarn' without a factor")
    return values | {"rope_scaling": yarn}


def rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """`rope_parameters` of transformers 5."""
    if config.rope_scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    yarn = {name: value for name, value in config.rope_scaling.model_dump().items() if value is not None}
    return {"rope_type": "yarn", "rope_theta": config.rope_theta, **yarn}
