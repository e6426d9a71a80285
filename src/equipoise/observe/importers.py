"""Load traces from what other programs record: each token's experts.

Tokens are put together to sequences and these to the microbatches of an EP group, as stated; what comes out has loads
by the router's choice, all experts at home, and each sequence's experts, so that any number of ranks can be simulated.
Nothing is unpickled.

Shapes: T tokens, L MoE layers, K experts per token, E experts, P ranks of the EP group, B sequences, S tokens each.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from equipoise.errors import ConfigError, TraceError
from equipoise.observe.schema import TraceInfo
from equipoise.observe.tables import LayerRows
from equipoise.observe.writer import TraceWriter

Counts = np.ndarray
"""int [L, B, E]: rows of each layer and sequence for each expert."""


def count_sequences(ids_LTK: np.ndarray, num_experts: int, sequence_length: int, where: str) -> Counts:
    """Rows of each sequence of `sequence_length` consecutive tokens; the last may be shorter. Ids of -1 are nobody's.

    Raises:
        TraceError: ids that are no experts; names `where`.
    """
    L, T, _ = ids_LTK.shape
    if ids_LTK.size and not -1 <= int(ids_LTK.min()) <= int(ids_LTK.max()) < num_experts:
        raise TraceError(
            f"{where}: experts {int(ids_LTK.min())} to {int(ids_LTK.max())}; expected 0 to {num_experts - 1} (-1: "
            "none). Give the right number of experts"
        )
    B = max(1, -(-T // sequence_length))
    sequence_T = np.arange(T) // sequence_length
    cell_LTK = (np.arange(L)[:, None, None] * B + sequence_T[None, :, None]) * num_experts + ids_LTK
    cells = cell_LTK[ids_LTK >= 0]
    return np.bincount(cells, minlength=L * B * num_experts).reshape(L, B, num_experts)


class _Importer:
    """Deals sequences to the ranks of one EP group and writes steps."""

    def __init__(self, out: Path, info: TraceInfo) -> None:
        if out.exists() and any(out.iterdir()):
            raise TraceError(f"{out} is not empty: give a new folder for the imported trace")
        self.info = info
        self.writer = TraceWriter(out, info, name="00000")

    def write(self, step: int, microbatch: int, counts_PLBE: Sequence[Counts]) -> None:
        """One microbatch: each rank's sequences."""
        load_LPE = np.stack([counts.sum(1) for counts in counts_PLBE], 1)
        home_LPM = load_LPE.sum(1).reshape(self.info.num_layers, self.info.ep_size, -1)
        self.writer.write_layers(LayerRows(step, microbatch, 0, load_LPE, home_LPM))
        for rank, counts in enumerate(counts_PLBE):
            self.writer.write_sequences(step, microbatch, 0, rank, counts)


def _check(num_experts: int, ep_size: int) -> None:
    if num_experts < 1 or ep_size < 1 or num_experts % ep_size:
        raise ConfigError(f"{num_experts} experts cannot be split evenly over an EP group of {ep_size} ranks")


def import_megatron(path: str | Path, out: str | Path, num_experts: int, ep_size: int, sequence_length: int) -> Path:
    """A trace of Megatron-LM's router tracer (`--moe-routing-trace-path`): `router_trace_rank<n>.jsonl` files.

    Each line has the chosen experts of one step, layer and rank (`top_indices` [T, K]). Ranks 0 to ep_size - 1 are
    taken as the EP group, each once; records of one step and layer that repeat are microbatches in order. Layers of
    multi-token prediction come after the decoder's. Steps, which count from 0 there, count from 1 here. Trace without
    activation recompute, which would be recorded as further microbatches.

    Args:
        path: the folder. out: a new folder for the trace.
        num_experts, ep_size: of the run. sequence_length: tokens of a sequence.

    Returns:
        `out`, for `open_trace`.

    Raises:
        TraceError: no such files, a line that is none of them, ranks that recorded different layers.
    """
    path, out = Path(path), Path(out)
    _check(num_experts, ep_size)
    files = [path / f"router_trace_rank{rank}.jsonl" for rank in range(ep_size)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise TraceError(f"{path} lacks {', '.join(missing[:3])}: expected one file for each of {ep_size} ranks")
    streams = [_megatron_steps(file) for file in files]
    importer: _Importer | None = None
    for records in zip(*streams):
        steps = {step for step, _ in records}
        layers = sorted(records[0][1])
        if len(steps) > 1 or any(sorted(found) != layers for _, found in records):
            raise TraceError(f"{path}: the ranks' files disagree on steps or layers after step {min(steps)}")
        if importer is None:
            top_k = records[0][1][layers[0]][0].shape[1]
            importer = _Importer(
                out,
                TraceInfo(len(layers), num_experts, top_k, ep_size, sequence_length=sequence_length, source="megatron"),
            )
        number = min(len(found[layer]) for _, found in records for layer in layers)
        for microbatch in range(number):
            counts = []
            for rank, (_, found) in enumerate(records):
                lengths = {found[layer][microbatch].shape for layer in layers}
                if len(lengths) > 1:
                    raise TraceError(f"{files[rank]}: layers of one microbatch have other numbers of tokens: {lengths}")
                ids = np.stack([found[layer][microbatch] for layer in layers])
                counts.append(count_sequences(ids, num_experts, sequence_length, str(files[rank])))
            importer.write(min(steps) + 1, microbatch, counts)
    if importer is None:
        raise TraceError(f"{path}: the files have no records")
    importer.writer.close()
    return out


LayerKey = tuple[int, int, int]
"""Of a Megatron record: decoder before multi-token prediction, which of those, and the layer."""


def _megatron_steps(path: Path) -> Iterator[tuple[int, dict[LayerKey, list[np.ndarray]]]]:
    """Each step of a rank with its layers' ids [T, K], one for each microbatch. One step is in memory at a time."""
    step: int | None = None
    layers: dict[LayerKey, list[np.ndarray]] = {}
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                this = int(record["step"])
                key = (int(record.get("block", "decoder") != "decoder"), int(record.get("mtp_idx", 0)), record["layer"])
                ids = np.array(record["top_indices"], np.int64).reshape(-1, int(record["topk"]))
            except (ValueError, KeyError, TypeError) as error:
                if not line.endswith("\n"):
                    break  # what a killed run left of a line
                raise TraceError(
                    f"{path}, line {number} is no record of Megatron's router tracer: {error!r}"
                ) from error
            if step is not None and this != step:
                yield step, layers
                layers = {}
            step = this
            layers.setdefault(key, []).append(ids)
    if step is not None:
        yield step, layers


def import_routed_experts(
    requests: Iterable[np.ndarray],
    out: str | Path,
    num_experts: int,
    ep_size: int,
    sequences_per_rank: int,
    layers: Sequence[int] | None = None,
    source: str = "vllm",
) -> Path:
    """A trace from what vLLM and SGLang return with `enable_return_routed_experts`: integer arrays [T, L, K].

    Each request is a sequence. Steps take `ep_size * sequences_per_rank` requests in turn; what is left over at the end
    is not written.

    Args:
        requests: an array for each request; `load_routed_experts` reads them from .npy files.
        out: a new folder for the trace.
        layers: which to take; default: those whose ids are not all 0, as those of dense layers are.

    Raises:
        TraceError: arrays of another shape or with unknown experts, or too few requests for one step.
    """
    out = Path(out)
    _check(num_experts, ep_size)
    needed = ep_size * sequences_per_rank
    importer: _Importer | None = None
    waiting: list[np.ndarray] = []
    step = 0
    for number, ids_TLK in enumerate(requests):
        if ids_TLK.ndim != 3 or not np.issubdtype(ids_TLK.dtype, np.integer):
            raise TraceError(
                f"request {number} is {ids_TLK.dtype} {ids_TLK.shape}; expected integers [tokens, layers, K]"
            )
        waiting.append(ids_TLK)
        if len(waiting) < needed:
            continue
        if layers is None:
            layers = [i for i in range(ids_TLK.shape[1]) if any((ids[:, i] != 0).any() for ids in waiting)]
        if importer is None:
            importer = _Importer(out, TraceInfo(len(layers), num_experts, ids_TLK.shape[2], ep_size, source=source))
        step += 1
        counts = [
            count_sequences(ids[:, list(layers)].transpose(1, 0, 2), num_experts, max(1, len(ids)), f"request {number}")
            for ids in waiting
        ]
        ranks = [counts[first : first + sequences_per_rank] for first in range(0, needed, sequences_per_rank)]
        importer.write(step, 0, [np.concatenate(rank, 1) for rank in ranks])
        waiting = []
    if importer is None:
        raise TraceError(
            f"{len(waiting)} requests, of which one step needs {needed} ({ep_size} ranks x {sequences_per_rank}): give "
            "more, or a smaller ep_size or sequences_per_rank"
        )
    importer.writer.close()
    return out


def load_routed_experts(folder: str | Path) -> Iterator[np.ndarray]:
    """The arrays of a folder's .npy files in order of their names.

    Raises:
        TraceError: no such files, or one that is not a plain array.
    """
    paths = sorted(Path(folder).glob("*.npy"))
    if not paths:
        raise TraceError(f"{folder}: there are no .npy files; save each request's routed_experts with numpy.save")
    for path in paths:
        try:
            yield np.load(path, allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise TraceError(f"{path} is not a plain numpy array: {error}") from error


def import_flame_moe(
    path: str | Path,
    out: str | Path,
    ep_size: int,
    sequences_per_rank: int,
    num_experts: int = 64,
    sequence_length: int = 2048,
    max_steps: int = 100,
) -> Path:
    """A trace from FLAME-MoE's routing traces: `actives/iter_<n>/layer_<n>.parquet`, a row for each token.

    Each checkpoint's tokens, in order, give `max_steps` microbatches at most, which are written as microbatches of the
    checkpoint's iteration.

    Args:
        path: a model's folder (with `actives/`). out: a new folder for the trace.
        sequences_per_rank: sequences of `sequence_length` tokens that a rank has in a microbatch.

    Raises:
        TraceError: no such files, iterations with other layers, columns that are missing, or too few tokens.
    """
    path, out = Path(path), Path(out)
    _check(num_experts, ep_size)
    folders = sorted((path / "actives").glob("iter_*"), key=lambda p: _number(p.name))
    if not folders:
        raise TraceError(
            f"{path}: there is no actives/iter_<n> in it; give the folder of one model of FLAME-MoE-Traces"
        )
    layers = sorted(_number(p.stem) for p in folders[0].glob("layer_*.parquet"))
    tokens = ep_size * sequences_per_rank * sequence_length
    importer: _Importer | None = None
    for folder in folders:
        files = [folder / f"layer_{layer:02d}.parquet" for layer in layers]
        missing = [str(file) for file in files if not file.is_file()]
        if missing or not layers:
            raise TraceError(f"{folder} lacks {', '.join(missing[:2]) or 'layer_<n>.parquet'}")
        for microbatch, chosen in enumerate(zip(*(_flame_tokens(file, tokens) for file in files))):
            if microbatch == max_steps:
                break
            ids_LTK = np.stack(chosen)
            if importer is None:
                info = TraceInfo(
                    len(layers),
                    num_experts,
                    ids_LTK.shape[2],
                    ep_size,
                    sequence_length=sequence_length,
                    source="flame-moe",
                )
                importer = _Importer(out, info)
            counts = count_sequences(ids_LTK, num_experts, sequence_length, str(folder))
            importer.write(_number(folder.name), microbatch, np.split(counts, ep_size, 1))
    if importer is None:
        raise TraceError(f"{path}: fewer than {tokens} tokens, which one microbatch of {ep_size} ranks takes")
    importer.writer.close()
    return out


def _number(name: str) -> int:
    found = re.search(r"(\d+)$", name)
    if found is None:
        raise TraceError(f"{name}: expected a name that ends in a number")
    return int(found[1])


def _flame_tokens(path: Path, tokens: int) -> Iterator[np.ndarray]:
    """Ids [T, K] of one layer, `tokens` at a time; the rest at the end is left out."""
    kept: list[np.ndarray] = []
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            if "indices" not in file.schema_arrow.names:
                raise TraceError(f"{path} has no column 'indices'; it has {file.schema_arrow.names}")
            for batch in file.iter_batches(batch_size=min(tokens, 1 << 16), columns=["indices"]):
                column = batch.column(0)
                ids = column.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
                kept.append(ids.reshape(len(column), -1))
                number += len(column)
                while number >= tokens:
                    whole = np.concatenate(kept)
                    yield whole[:tokens]
                    kept, number = [whole[tokens:]], number - tokens
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
