"""Settings that `model.load_from` brings along: the model's, and its tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from equipoise.checkpoint.hf.folder import HFFolder
from equipoise.errors import CheckpointError
from equipoise.models.config import TRAINING_ONLY, ModelConfig


def with_pretrained(values: Any) -> Any:
    """The values of a configuration, with those of the model that its `model.load_from` names, and the tokenizer in its
    folder where none is given.

    Settings that say how the model is trained may be given otherwise, and fewer layers for further tokens.

    Raises:
        ValueError: the folder cannot be read, or a given setting contradicts it.
    """
    given = values.get("model") if isinstance(values, Mapping) else None
    if not isinstance(given, Mapping) or not given.get("load_from"):
        return values
    folder = Path(given["load_from"])
    try:
        opened = HFFolder(folder)
    except CheckpointError as error:
        raise ValueError(
            f"model.load_from: {error}. (A run that has a checkpoint goes on without the folder, from its config.toml "
            "with --model.load_from none)"
        ) from error
    opened.close()
    data = values.get("data", {})
    if isinstance(data, Mapping) and "tokenizer" not in data and (folder / "tokenizer.json").is_file():
        values = {**values, "data": {**data, "tokenizer": str(folder)}}
    own = opened.config.model_dump()
    merged = own | dict(given)
    if isinstance(own["rope_scaling"], dict) and isinstance(given.get("rope_scaling"), Mapping):
        merged["rope_scaling"] = own["rope_scaling"] | dict(given["rope_scaling"])
    try:
        now = ModelConfig.model_validate(merged).model_dump()
    except ValidationError:
        return {**values, "model": merged}  # reported with all other problems of the settings
    problems = [
        f"model.{name} is {now[name]}, but {folder} has {value}"
        for name, value in own.items()
        if now[name] != value and name not in TRAINING_ONLY and not _fewer(name, now[name], value)
    ]
    if problems:
        raise ValueError(f"{'; '.join(problems)}: leave out what model.load_from brings along")
    return {**values, "model": merged}


def _fewer(name: str, given: Any, own: Any) -> bool:
    return name == "num_nextn_predict_layers" and given < own
