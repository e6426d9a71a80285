"""Weights from files into an engine: a folder of safetensors, or a checkpoint of a training run."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import checkpoint as dcp

from equipoise.checkpoint.layout import TRAIN_STATE, newest_complete
from equipoise.checkpoint.tensors import MODEL
from equipoise.distributed.weight_update import Manifest, TensorSpec, WeightReceiver, plan_buckets
from equipoise.distributed.weight_update.checksum import checksum
from equipoise.errors import ConfigError, WeightUpdateError
from equipoise.models.config import ModelConfig
from equipoise.serve.regions import hf_regions

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Folder(NamedTuple):
    """A model on disk: its configuration, its shapes by names of a Hugging Face checkpoint, and how to read one."""

    config: ModelConfig
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], torch.Tensor]
    eos_ids: list[int]


def open_folder(path: Path) -> Folder:
    """A folder with `config.json` and safetensors, a run folder, or one checkpoint of a run.

    Raises:
        ConfigError: it is none of these.
    """
    if (path / "config.json").is_file():
        return _open_hf(path)
    checkpoint = path if (path / TRAIN_STATE).is_file() else newest_complete(path / "checkpoints")
    if checkpoint is None:
        raise ConfigError(
            f"{path} holds no model: expected a folder with config.json and {SINGLE}, a run folder with a checkpoint, "
            "or a checkpoint of a run"
        )
    return _open_checkpoint(checkpoint)


def _open_hf(path: Path) -> Folder:
    from safetensors import SafetensorError, safe_open

    try:
        hf = json.loads((path / "config.json").read_text())
        config = ModelConfig.from_hf(hf)
        names = {SINGLE}
        if (path / INDEX).is_file():
            names = set(json.loads((path / INDEX).read_text())["weight_map"].values())
        files = {name: safe_open(path / name, framework="pt") for name in names}
        where = {key: file for file in files.values() for key in file.keys()}  # noqa: SIM118 - no dictionary
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key, file in where.items()}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"the model in {path} cannot be read: {type(error).__name__}: {error}") from None
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    eos = hf.get("eos_token_id")
    return Folder(
        config,
        shapes,
        lambda key: where[key].get_tensor(key),
        [] if eos is None else list(eos) if isinstance(eos, list) else [eos],
    )


def _open_checkpoint(path: Path) -> Folder:
    state = json.loads((path / TRAIN_STATE).read_text())
    config = ModelConfig(**state["config"]["model"])
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    stored: dict[str, Any] = {key.removeprefix(MODEL): entry for key, entry in entries.items() if key.startswith(MODEL)}
    regions = hf_regions({name: tuple(entry.size) for name, entry in stored.items()})
    held: dict[str, torch.Tensor] = {}

    def whole(name: str) -> torch.Tensor:
        """Our tensor; the last one read is kept, since neighbours are asked for in turn."""
        if name not in held:
            held.clear()
            held[name] = torch.empty(tuple(stored[name].size), dtype=stored[name].properties.dtype)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(
                    {MODEL + name: held[name]},
                    storage_reader=dcp.FileSystemReader(path),
                    planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
                    no_dist=True,
                )
        return held[name]

    def read(key: str) -> torch.Tensor:
        region = regions[key]
        part = whole(region.tensor)[tuple(slice(a, a + n) for a, n in zip(region.start, region.size))]
        return part.reshape(region.shape)

    return Folder(config, {key: region.shape for key, region in regions.items()}, read, [])


def load_folder(path: Path, receiver: WeightReceiver, version: str) -> None:
    """Puts a folder's weights into an engine's, cast to its dtypes.

    Raises:
        ConfigError: the folder cannot be read.
        WeightUpdateError: it is another model's; nothing was changed then.
    """
    folder = open_folder(path)
    specs: Mapping[str, TensorSpec] = receiver.specs
    given = {
        name: TensorSpec(shape, specs[name].dtype if name in specs else "float32")
        for name, shape in folder.shapes.items()
    }
    buckets = plan_buckets(given.items(), 1, split=False)
    receiver.begin(Manifest(version=version, tensors=given, buckets=buckets))
    try:
        sums = {}
        for index, data in _buckets(folder, given, receiver):
            receiver.load(index, data)
            sums[index] = int(checksum(data[: buckets[index].num_bytes]))
        receiver.commit(sums)
    except Exception as error:
        receiver.abandon(str(error))
        raise WeightUpdateError(f"{path} could not be loaded: {error}") from error


def _buckets(
    folder: Folder, specs: Mapping[str, TensorSpec], receiver: WeightReceiver
) -> Iterator[tuple[int, torch.Tensor]]:
    """Number and bytes of the buckets, one tensor each, that belong to this rank."""
    assert receiver.manifest is not None
    for index, bucket in enumerate(receiver.manifest.buckets):
        (piece,) = bucket.pieces
        if piece.name not in receiver.targets:
            continue
        tensor = folder.read(piece.name).to(specs[piece.name].torch_dtype).contiguous()
        raw = tensor.reshape(-1).view(torch.uint8)
        yield index, torch.nn.functional.pad(raw, (0, bucket.num_bytes - raw.numel()))
