"""A folder of safetensors files with a `config.json`: what is in it, and whether that is what the model needs.

Everything that headers can tell is checked on opening, so nothing is changed by a checkpoint that is not whole.
"""

import json
import logging
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from equipoise.checkpoint.hf.fp8 import FP8, SCALE_SUFFIX, check_quantization, scale_shape
from equipoise.checkpoint.hf.mapping import HFMapping
from equipoise.checkpoint.hf.safetensors_file import Entry, SafetensorsReader
from equipoise.errors import CheckpointError
from equipoise.models.config import ModelConfig
from equipoise.models.families import NATIVE, ExpertLayout, Family, family_of_type

logger = logging.getLogger(__name__)

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
ORIGINAL_CONFIG = "hf_config.json"
"""In our own folders: the `config.json` that the model came with."""
_BESIDE = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"}
_LISTED = 5
_PER_EXPERT, _STACKED = re.compile(r"\.experts\.\d+\."), re.compile(r"\.experts\.(gate_up|down)_proj$")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError for anything else."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {path.parent} is no folder of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def original_config(path: Path) -> dict[str, Any] | None:
    """The `config.json` of the family that a folder's model came with; None if that is not known (any more)."""
    if (path / ORIGINAL_CONFIG).exists():
        return read_json(path / ORIGINAL_CONFIG)
    if not (path / CONFIG).exists():
        return None
    declared = read_json(path / CONFIG)
    return None if declared.get("model_type") == NATIVE.model_type else declared


def beside(path: Path) -> list[Path]:
    """Files of a folder that belong to the model and hold no tensors: tokenizer, chat template, ..."""
    own = {CONFIG, INDEX, ORIGINAL_CONFIG}
    files = (file for file in sorted(path.iterdir()) if file.is_file() and file.name not in own)
    return [file for file in files if file.suffix in _BESIDE or file.name.startswith("LICENSE")]


class HFFolder:
    """An open, checked folder.

    Args:
        config: the model to be filled, which may have fewer MTP layers than the folder; None takes the folder's own.

    Raises:
        CheckpointError: see `FolderSource`.
    """

    def __init__(self, path: Path, config: ModelConfig | None = None) -> None:
        self.path = path
        declared = read_json(path / CONFIG)
        try:
            self.family: Family = family_of_type(declared.get("model_type"))
            own = ModelConfig.from_hf(declared)
        except ValueError as error:
            raise CheckpointError(f"{path / CONFIG}: {error}") from error
        self.is_fp8 = check_quantization(declared, path / CONFIG)
        self.hf_config = original_config(path)
        with ExitStack() as opened:
            self._readers = self._open_files(opened)
            own = self._without_absent_mtp(own)
            self.config = own if config is None else config
            self.mapping = HFMapping(self.config, self.family, self._layout())
            self._check(own)
            self._opened = opened.pop_all()

    def _open_files(self, opened: ExitStack) -> dict[str, SafetensorsReader]:
        """The file of every tensor."""
        if (self.path / INDEX).exists():
            return self._open_indexed(opened, read_json(self.path / INDEX).get("weight_map"))
        if not (self.path / SINGLE).exists():
            others = sorted(p.name for p in self.path.glob("*.safetensors")) or sorted(
                p.name for p in [*self.path.glob("*.bin"), *self.path.glob("*.pt"), *self.path.glob("*.gguf")]
            )
            found = f"there are {', '.join(others[:3])}" if others else "there are no weights"
            raise CheckpointError(
                f"{self.path} has neither {INDEX} nor {SINGLE}; {found}. Only safetensors files are read, and several "
                "need their index"
            )
        reader = opened.enter_context(SafetensorsReader(self.path / SINGLE))
        return dict.fromkeys(reader.entries, reader)

    def _open_indexed(self, opened: ExitStack, weight_map: Any) -> dict[str, SafetensorsReader]:
        index = self.path / INDEX
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map")
        files: dict[str, SafetensorsReader] = {}
        for name in sorted(set(map(str, weight_map.values()))):
            if Path(name).name != name:
                raise CheckpointError(f"{index} names {name!r}, which is no file of the folder")
            if not (self.path / name).is_file():
                first = next(key for key, file in weight_map.items() if file == name)
                raise CheckpointError(f"{self.path / name} is missing; {index.name} says it holds {first!r} and others")
            files[name] = opened.enter_context(SafetensorsReader(self.path / name))
        problems = [
            f"{key!r} is not in {self.path / name}, where {index.name} says it is"
            for key, name in weight_map.items()
            if key not in files[name].entries
        ]
        for name, reader in files.items():
            for key in reader.entries:
                if weight_map.get(key) != name:
                    where = f"says it is in {weight_map[key]}" if key in weight_map else "does not list it"
                    problems.append(f"{key!r} is in {reader.path}, but {index.name} {where}")
        _raise_for(problems)
        return {key: files[name] for key, name in weight_map.items()}

    def _without_absent_mtp(self, config: ModelConfig) -> ModelConfig:
        """transformers drops the layers that predict further tokens when it saves, and keeps their number."""
        found = {int(m[1]) for key in self._readers if (m := _LAYER.search(key))}
        if not config.num_nextn_predict_layers or any(n >= config.num_hidden_layers for n in found):
            return config
        logger.warning(
            "%s declares %d multi-token-prediction layers but holds none: the model is read without them",
            self.path / CONFIG,
            config.num_nextn_predict_layers,
        )
        return config.model_copy(update={"num_nextn_predict_layers": 0})

    def _layout(self) -> ExpertLayout:
        """By the names of the tensors, among the layouts that the family has. Never by shapes."""
        layouts = self.family.expert_layouts
        if "per_expert" not in layouts:
            return layouts[0]
        single = next((key for key in self._readers if _PER_EXPERT.search(key)), None)
        stacked = next((key for key in self._readers if _STACKED.search(key)), None)
        if single and stacked:
            raise CheckpointError(
                f"the experts are there twice: {single!r} in {self._readers[single].path} and {stacked!r} in "
                f"{self._readers[stacked].path}. Remove one form from the folder and its index"
            )
        if stacked is None:
            return "per_expert"
        return next(layout for layout in layouts if layout != "per_expert")

    def _check(self, own: ModelConfig) -> None:
        wanted = self.mapping.sources
        problems = [
            f"{key!r} is in no file of {self.path} (expected shape {list(piece.shape)})"
            for key, (_, piece) in wanted.items()
            if key not in self._readers
        ]
        for key, reader in self._readers.items():
            entry = reader.entries[key]
            shape: tuple[int, ...] | None = None
            if key in wanted:
                shape = wanted[key][1].shape
            elif key in self.mapping.copies:
                shape = wanted[self.mapping.copies[key]][1].shape
            elif key.endswith(SCALE_SUFFIX) and self._is_fp8_matrix(key.removesuffix(SCALE_SUFFIX)):
                matrix = self.entry(key.removesuffix(SCALE_SUFFIX))
                shape = scale_shape(matrix.shape)
            elif self._is_ignored(key, own):
                continue
            else:
                problems.append(f"{key!r} in {reader.path} is no tensor of this {self.family.model_type} model")
                continue
            if entry.shape != shape:
                problems.append(f"{key!r} in {reader.path} has shape {list(entry.shape)}; expected {list(shape)}")
            elif not entry.dtype.is_floating_point:
                problems.append(f"{key!r} in {reader.path} is of {entry.dtype}, which is no dtype of weights")
            elif entry.dtype.itemsize == 1 and not (self._is_fp8_matrix(key) and key + SCALE_SUFFIX in self._readers):
                problems.append(
                    f"{key!r} in {reader.path} is of {entry.dtype} without {key + SCALE_SUFFIX!r}: only matrices with "
                    "factors of their blocks, declared in quantization_config, can be read"
                )
        _raise_for(problems)

    def _is_fp8_matrix(self, key: str) -> bool:
        reader = self._readers.get(key)
        if reader is None or not self.is_fp8:
            return False
        return reader.entries[key].dtype == FP8 and len(reader.entries[key].shape) == 2

    def _is_ignored(self, key: str, own: ModelConfig) -> bool:
        """Buffers that old files have, and layers of the folder's model that the model to be filled goes without."""
        layer = _LAYER.search(key)
        dropped = layer is not None and self.config.num_layers <= int(layer[1]) < own.num_layers
        return dropped or self.family.ignored_pattern.search(key) is not None

    def has(self, key: str) -> bool:
        """Whether a file holds the tensor."""
        return key in self._readers

    def reader(self, key: str) -> SafetensorsReader:
        """The file that holds a tensor."""
        return self._readers[key]

    def entry(self, key: str) -> Entry:
        """Dtype and shape of a tensor."""
        return self._readers[key].entries[key]

    def close(self) -> None:
        """Closes the files."""
        self._opened.close()


def _raise_for(problems: list[str]) -> None:
    if problems:
        more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise CheckpointError("; ".join(problems[:_LISTED]) + more + ". Nothing was changed")
