"""Writes a model as a folder of safetensors files, tensor by tensor, from any source.

The folder is written beside its final name and renamed when it is whole. No tensor is held but the rows in work.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from equipoise.checkpoint.hf.folder import CONFIG, INDEX, ORIGINAL_CONFIG, SINGLE
from equipoise.checkpoint.hf.form import Header, MatrixForm, Rows
from equipoise.checkpoint.hf.fp8 import FP8, FP8Blocks
from equipoise.checkpoint.hf.mapping import HFMapping, Piece
from equipoise.checkpoint.hf.safetensors_file import SafetensorsWriter
from equipoise.checkpoint.hf.source import Source
from equipoise.checkpoint.sizes import in_words
from equipoise.errors import CheckpointError
from equipoise.models.config import TRAINING_ONLY, ModelConfig
from equipoise.models.families import NATIVE, ExpertLayout

Target = Literal["hf", "native"]
Progress = Callable[[int, int], None]
"""Called with the bytes written so far and those of all tensors."""

ROWS_BYTES = 32 << 20
"""Bytes of the rows that are read, cast and written at a time; one row may be more."""
SHARD_BYTES = 5_000_000_000
"""Largest file, unless one tensor is larger; what the Hub recommends."""


@dataclass(frozen=True)
class Output:
    """One tensor to write: a piece of a parameter, in the dtype that it gets."""

    key: str
    name: str
    piece: Piece
    dtype: torch.dtype
    form: MatrixForm | None
    """None, or how the matrix is stored in fewer bits; `dtype` is then that of the values it stands for."""

    @property
    def header(self) -> Header:
        """The tensors of the file that it becomes."""
        shape = self.piece.shape
        return {self.key: (self.dtype, shape)} if self.form is None else self.form.header(self.key, shape)

    @property
    def num_bytes(self) -> int:
        return sum(_num_bytes(dtype, shape) for dtype, shape in self.header.values())


def _num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * torch.Size(shape).numel()


def export(
    source: Source,
    target: Path,
    to: Target,
    dtype: torch.dtype | MatrixForm | None = None,
    experts: ExpertLayout | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Path:
    """Writes the model of `source` to the folder `target` and returns it.

    Args:
        to: `hf` writes the family's names and `config.json`, `native` ours.
        dtype: of the weights; None keeps what the source has. The selection bias of the router stays FP32. FP8 (in
            blocks) and INT4 (`INT4Groups`) are for the matrices that the family has so; other tensors are then BF16.
        experts: layout of the experts; None takes the one that the family writes.
        shard_bytes: a new file begins where it would become larger.

    Raises:
        CheckpointError: before anything is written, if the model has no family, the folder is there already, the space
            does not suffice, or the source is inconsistent; later, if writing fails. Nothing is left behind then.
    """
    mapping = HFMapping(source.config, NATIVE if to == "native" else None, experts)
    form = FP8Blocks() if dtype == FP8 else dtype if isinstance(dtype, MatrixForm) else None
    outputs = plan(source, mapping, None if isinstance(dtype, MatrixForm) else dtype, form)
    total = sum(output.num_bytes for output in outputs)
    source.check_contents()
    partial = _prepare(Path(target), total)
    try:
        files = _shards(outputs, shard_bytes)
        _write_files(source, partial, files, total, progress or (lambda done, total: None))
        _write_config(source, mapping, partial, form, outputs)
        for file in source.files_beside():
            shutil.copyfile(file, partial / file.name)
        os.rename(partial, target)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}. Nothing was left there") from error
    finally:
        if partial.exists():
            shutil.rmtree(partial, ignore_errors=True)
    return Path(target)


def plan(source: Source, mapping: HFMapping, dtype: torch.dtype | None, form: MatrixForm | None = None) -> list[Output]:
    """The tensors to write, in the order of our parameters. Raises CheckpointError if the source lacks some."""
    if form is not None and mapping.experts != "per_expert":
        raise CheckpointError(f"{form.name} is written per expert only: leave --experts out and convert to hf")
    wanted = mapping.tensors
    problems = [f"{name!r} is missing" for name in wanted if name not in source.tensors]
    problems += [f"{name!r} is no parameter of the model" for name in source.tensors if name not in wanted]
    for name, stored in wanted.items():
        if name in source.tensors and source.tensors[name].shape != stored.shape:
            problems.append(f"{name!r} has shape {list(source.tensors[name].shape)}; expected {list(stored.shape)}")
    if problems:
        raise CheckpointError(f"{source.path}: {'; '.join(problems[:5])}")
    outputs = []
    for name in wanted:
        own = source.tensors[name].dtype
        pieces = [(piece.key, piece) for piece in mapping.pieces(name)]
        pieces += [(key, mapping.pieces(name)[0]) for key in mapping.written_copies.get(name, [])]
        outputs += [_output(mapping, key, name, piece, own, dtype, form) for key, piece in pieces]
    refused = [o.form.refusal(o.key, o.piece.shape) for o in outputs if o.form is not None]
    if any(refused):
        raise CheckpointError(f"{source.path}: {next(filter(None, refused))}. Choose another group size (--group-size)")
    return outputs


def _output(
    mapping: HFMapping,
    key: str,
    name: str,
    piece: Piece,
    own: torch.dtype,
    dtype: torch.dtype | None,
    form: MatrixForm | None,
) -> Output:
    if mapping.family.fp32_pattern.search(key) and (dtype is not None or form is not None):
        return Output(key, name, piece, torch.float32, None)
    if form is None:
        return Output(key, name, piece, dtype or own, None)
    return Output(key, name, piece, torch.bfloat16, form if form.pattern(mapping.family).search(key) else None)


def _prepare(target: Path, num_bytes: int) -> Path:
    """An empty folder beside `target`."""
    partial = target.with_name(target.name + ".tmp")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is there already and is not overwritten: choose another folder")
    if partial.exists():
        raise CheckpointError(f"{partial} is there: another conversion is writing it, or was killed. Remove it then")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < num_bytes:
            raise CheckpointError(
                f"{target.parent} has {in_words(free)} free, and the model needs {in_words(num_bytes)}"
            )
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror}; choose another folder") from error
    return partial


def _shards(outputs: list[Output], shard_bytes: int) -> dict[str, list[Output]]:
    """Outputs by file, in order."""
    shards: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        if shards[-1] and size + output.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(output)
        size += output.num_bytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _write_files(source: Source, folder: Path, files: dict[str, list[Output]], total: int, progress: Progress) -> None:
    weight_map: dict[str, str] = {}
    done = 0
    for name, outputs in files.items():
        header = {key: value for output in outputs for key, value in output.header.items()}
        weight_map |= dict.fromkeys(header, name)
        writer = SafetensorsWriter(folder / name, header)
        with ExitStack() as held:
            held.callback(writer.discard)
            threads = held.enter_context(ThreadPoolExecutor(1, "write"))
            pending: Future[None] | None = None
            for rows in _all_rows(source, outputs):  # the next rows are read while the last are written
                if pending is not None:
                    pending.result()
                pending = threads.submit(_write_rows, writer, rows)
                done += sum(tensor.numel() * tensor.itemsize for _, _, tensor in rows)
                progress(done, total)
            if pending is not None:
                pending.result()
            writer.close()
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / INDEX, index)


def _write_rows(writer: SafetensorsWriter, rows: Rows) -> None:
    for key, start, tensor in rows:
        writer.write_rows(key, start, tensor)


def _all_rows(source: Source, outputs: list[Output]) -> Iterator[Rows]:
    for output in outputs:
        shape = output.piece.shape
        row_bytes = max(1, _num_bytes(torch.float32, shape[1:]))
        step = max(1, ROWS_BYTES // row_bytes)
        if output.form is not None:
            step = -(-step // output.form.row_step) * output.form.row_step
        for start in range(0, shape[0], step):
            yield _rows(source, output, start, min(step, shape[0] - start))
        if output.form is not None:
            yield output.form.closing_rows(output.key, shape)


def _rows(source: Source, output: Output, first: int, count: int) -> Rows:
    piece = output.piece
    dim = 1 if piece.is_slice else 0  # of our parameter, along which the rows of the file lie
    start, size = list(piece.start), list(piece.size)
    start[dim], size[dim] = start[dim] + first, count
    dtype = output.dtype if output.form is None else torch.float32
    values = piece.as_stored(source.read(output.name, tuple(start), tuple(size), dtype)).contiguous()
    return [(output.key, first, values)] if output.form is None else output.form.encode(output.key, first, values)


def _write_config(
    source: Source, mapping: HFMapping, folder: Path, form: MatrixForm | None, outputs: list[Output]
) -> None:
    family, original = mapping.family, source.hf_config
    if family is NATIVE:
        _write_json(folder / CONFIG, {"model_type": family.model_type, **family.write_config(source.config)})
        if original is not None:
            _write_json(folder / ORIGINAL_CONFIG, original)
        return
    config = hf_config(mapping, original)
    # What most values have; the selection bias is FP32 beside BF16 weights.
    sizes: dict[torch.dtype, int] = {}
    for output in outputs:
        sizes[output.dtype] = sizes.get(output.dtype, 0) + output.num_bytes
    name = str(max(sizes, key=lambda d: sizes[d])).removeprefix("torch.")
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = name
    if form is not None:
        matrices = [o.key for o in outputs if o.form is None and len(o.piece.shape) == 2 and o.key.endswith(".weight")]
        config["quantization_config"] = form.declaration(matrices)
    _write_json(folder / CONFIG, config)


def hf_config(mapping: HFMapping, original: dict[str, Any] | None = None) -> dict[str, Any]:
    """The `config.json` of the model's family: the original one where it describes the same model, with the fields that
    have changed; without one, what the family needs."""
    family, model = mapping.family, mapping.config
    if original is None or original.get("model_type") != family.model_type:
        absent = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # not those of the released model
        return {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            **absent,
            **family.write_config(model),
        }
    config = {key: value for key, value in original.items() if key != "quantization_config"}
    now, then = model.model_dump(), ModelConfig.from_hf(original).model_dump()
    if any(now[name] != then[name] for name in now if name not in TRAINING_ONLY or name == "max_position_embeddings"):
        config |= family.write_config(model)
        if "rope_parameters" in config and "rope_scaling" in config:
            del config["rope_scaling"]
    return config


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with open(path, "x") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
