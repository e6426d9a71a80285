"""Weights from files into an engine: whatever `equipoise convert` reads."""

import logging
from pathlib import Path

import torch

from equipoise.checkpoint.hf import Source, open_source
from equipoise.distributed.weight_update import Manifest, TensorSpec, WeightReceiver, plan_buckets
from equipoise.errors import EquipoiseError, WeightUpdateError
from equipoise.kernels.checksum import checksum
from equipoise.serve.regions import hf_regions

logger = logging.getLogger(__name__)


def eos_ids_of(source: Source) -> list[int]:
    """End-of-sequence ids of a folder's `config.json`."""
    found = (source.hf_config or {}).get("eos_token_id")
    return [] if found is None else list(found) if isinstance(found, list) else [found]


def load_folder(path: Path, receiver: WeightReceiver, version: str) -> None:
    """Puts a folder's weights into an engine's, cast to its dtypes; every rank reads what it holds.

    Raises:
        CheckpointError: the folder cannot be read; nothing was changed.
        WeightUpdateError: it is another model's, and nothing was changed; or it changed while being read.
    """
    source = open_source(path)
    try:
        regions = hf_regions({name: stored.shape for name, stored in source.tensors.items()})
        specs = {
            name: TensorSpec(region.shape, receiver.specs[name].dtype if name in receiver.specs else "float32")
            for name, region in regions.items()
        }
        buckets = plan_buckets(specs.items(), 1, split=False)
        receiver.begin(Manifest(version=version, tensors=specs, buckets=buckets))
        sums = {}
        for index, bucket in enumerate(buckets):
            (piece,) = bucket.pieces
            if piece.name not in receiver.targets:
                continue
            region = regions[piece.name]
            tensor = source.read(region.tensor, region.start, region.size, specs[piece.name].torch_dtype)
            data = tensor.reshape(-1).view(torch.uint8)
            data = torch.nn.functional.pad(data, (0, bucket.num_bytes - data.numel()))
            receiver.load(index, data)
            sums[index] = int(checksum(data))
        receiver.commit(sums)
    except (EquipoiseError, OSError) as error:
        receiver.abandon(str(error))
        raise error if isinstance(error, WeightUpdateError) else WeightUpdateError(f"{path}: {error}") from error
    finally:
        source.close()
