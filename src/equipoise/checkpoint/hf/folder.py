"""A folder of safetensors files with a `config.json`: what is in it, and whether that is what the model needs.

Everything that headers can tell is checked on opening, so nothing is changed by a checkpoint that is not whole.
"""

import json
import logging
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from equipoise.checkpoint.hf.form import Header, fits
from equipoise.checkpoint.hf.fp8 import SCALE_SUFFIX
from equipoise.checkpoint.hf.mapping import HFMapping
from equipoise.checkpoint.hf.quantization import declared_form
from equipoise.checkpoint.hf.safetensors_file import Entry, SafetensorsReader
from equipoise.errors import CheckpointError
from equipoise.models.config import OF_WEIGHTS, ModelConfig, describe_changes, model_changes
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
        self.form = declared_form(declared, path / CONFIG)
        self.hf_config = original_config(path)
        self._quantized: dict[str, tuple[int, ...]] = {}
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
        shapes = {key: piece.shape for key, (_, piece) in wanted.items()}
        shapes |= {copy: shapes[original] for copy, original in self.mapping.copies.items()}
        entries = {key: reader.entries[key] for key, reader in self._readers.items()}
        expected: Header = {}  # of the parts of matrices in fewer bits
        if self.form is not None:
            for key, shape in shapes.items():
                if self.form.is_used(key, entries):
                    self._quantized[key] = shape
                    expected |= self.form.header(key, shape)
        plain = {key: shape for key, shape in shapes.items() if key not in self._quantized}
        absent = {key: shape for key, shape in plain.items() if key in wanted}
        absent |= {part: shape for part, (_, shape) in expected.items()}
        problems = [
            f"{key!r} is in no file of {self.path} (expected shape {list(shape)})"
            for key, shape in absent.items()
            if key not in entries
        ]
        for key, entry in entries.items():
            where = self._readers[key].path
            if key in expected:
                dtype, shape = expected[key]
                if not fits(entry.dtype, dtype):
                    problems.append(f"{key!r} in {where} is of {entry.dtype}; expected {dtype}")
            elif key in plain:
                shape = plain[key]
                if not entry.dtype.is_floating_point:
                    problems.append(f"{key!r} in {where} is of {entry.dtype}, which is no dtype of weights")
                elif entry.dtype.itemsize == 1:
                    problems.append(
                        f"{key!r} in {where} is of {entry.dtype} without {key + SCALE_SUFFIX!r}: only matrices with "
                        "factors of their blocks, declared in quantization_config, can be read"
                    )
            elif key in self._quantized:
                problems.append(f"{key!r} is there twice: in {where}, and in {self.form.name} beside it")  # type: ignore[union-attr]
                continue
            elif self._is_ignored(key, own):
                continue
            else:
                problems.append(f"{key!r} in {where} is no tensor of this {self.family.model_type} model")
                continue
            if entry.shape != shape:
                problems.append(f"{key!r} in {where} has shape {list(entry.shape)}; expected {list(shape)}")
        _raise_for(problems, self._other_settings(own))

    def _other_settings(self, own: ModelConfig) -> str:
        """Where the model to be filled is another than that of the folder: the settings, as the begin of a message."""
        changes = model_changes(own.model_dump(mode="json"), self.config.model_dump(mode="json"))
        changes = {name: values for name, values in changes.items() if name in OF_WEIGHTS}
        return f"{describe_changes(changes, str(self.path / CONFIG))}. So " if changes else ""

    def _is_ignored(self, key: str, own: ModelConfig) -> bool:
        """Buffers that old files have, and layers of the folder's model that the model to be filled goes without."""
        layer = _LAYER.search(key)
        dropped = layer is not None and self.config.num_layers <= int(layer[1]) < own.num_layers
        return dropped or self.family.ignored_pattern.search(key) is not None

    def parts(self, key: str) -> list[str]:
        """The tensors in files that hold a tensor of the family: several for a matrix in fewer bits, none if absent."""
        if key in self._quantized:
            assert self.form is not None
            return list(self.form.header(key, self._quantized[key]))
        return [key] if key in self._readers else []

    def is_quantized(self, key: str) -> bool:
        """Whether a matrix is there in the folder's form of fewer bits."""
        return key in self._quantized

    def reader(self, key: str) -> SafetensorsReader:
        """The file that holds a tensor."""
        return self._readers[key]

    def entry(self, key: str) -> Entry:
        """Dtype and shape of a tensor."""
        return self._readers[key].entries[key]

    def dtype(self, key: str) -> torch.dtype:
        """The dtype that fits what is stored: BF16 for a matrix in fewer bits."""
        return torch.bfloat16 if key in self._quantized else self.entry(key).dtype

    def read_rows(self, key: str, first: int, count: int) -> torch.Tensor:
        """Rows of a tensor in files, as they are stored."""
        entry = self.entry(key)
        out = torch.empty(count, *entry.shape[1:], dtype=entry.dtype)
        self._readers[key].read_rows(key, first, out)
        return out

    def decode(self, key: str, rows: slice) -> torch.Tensor:
        """FP32 values of rows of a matrix in fewer bits."""
        assert self.form is not None
        return self.form.decode(key, self._quantized[key], rows, self.read_rows)

    def check_quantized(self, share: int, shares: int) -> None:
        """Raises CheckpointError where what is stored of a matrix in fewer bits contradicts its shape."""
        problems = []
        for key, shape in list(self._quantized.items())[share::shares]:
            assert self.form is not None
            problem = self.form.contradiction(key, shape, self.read_rows)
            if problem is not None:
                problems.append(f"{self._readers[self.parts(key)[0]].path}: {problem}")
        _raise_for(problems)

    def close(self) -> None:
        """Closes the files."""
        self._opened.close()


def _raise_for(problems: list[str], why: str = "") -> None:
    if problems:
        more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise CheckpointError(why + "; ".join(problems[:_LISTED]) + more + ". Nothing was changed")
