"""Families of Hugging Face models that are native here, one file each: what its config and tensors are called."""

from equipoise.models.families import deepseek_v3, qwen3_moe, qwen3_vl_moe
from equipoise.models.families.family import ExpertLayout, Family, misfits
from equipoise.models.families.native import NATIVE

FAMILIES: tuple[Family, ...] = (qwen3_moe.FAMILY, deepseek_v3.FAMILY, qwen3_vl_moe.FAMILY)
"""A model is written as the first of them that can express it."""

__all__ = ["FAMILIES", "NATIVE", "ExpertLayout", "Family", "family_of_type", "misfits"]


def family_of_type(model_type: object) -> Family:
    """The family of a `config.json` by its `model_type`. Raises ValueError for one that is not native."""
    for family in (*FAMILIES, NATIVE):
        if family.model_type == model_type:
            return family
    known = ", ".join(repr(family.model_type) for family in FAMILIES)
    raise ValueError(
        f"model_type {model_type!r} cannot be read: only {known} are supported. Train other families in transformers, "
        "with equipoise.integrations.transformers"
    )
