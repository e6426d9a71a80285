"""Traces of other programs become load traces that hold the same tokens."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from equipoise.errors import ConfigError, TraceError
from equipoise.observe.importers import (
    import_flame_moe,
    import_megatron,
    import_routed_experts,
    load_routed_experts,
)
from equipoise.observe.reader import open_trace
from equipoise.simulate.loads import trace_loads

E, K = 6, 2


def choices(seed: int, *shape: int) -> np.ndarray:
    """Distinct experts of each token."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((*shape, E)), axis=-1)[..., :K]


def histogram(ids: np.ndarray) -> list[int]:
    return np.bincount(ids.ravel(), minlength=E).tolist()


def write_megatron(folder: Path, ranks: int = 2, layers=(3, 4), lines_of=lambda lines: lines) -> dict:
    """Two steps of two microbatches, and a multi-token-prediction layer with a decoder layer's number."""
    tokens = {}
    for rank in range(ranks):
        lines = []
        for step in range(2):
            for microbatch in range(2):
                for place, layer in enumerate((*layers, 3)):
                    ids = choices(1000 * rank + 100 * step + 10 * microbatch + place, 5)
                    tokens[rank, step, microbatch, place] = ids
                    record = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": rank}
                    record |= {"num_tokens": 5, "topk": K, "top_indices": ids.tolist()}
                    if place == len(layers):
                        record |= {"block": "mtp", "mtp_idx": 0}
                    lines.append(json.dumps(record) + "\n")
        folder.mkdir(exist_ok=True)
        (folder / f"router_trace_rank{rank}.jsonl").write_text("".join(lines_of(lines)))
    return tokens


def test_megatrons_router_trace(tmp_path: Path) -> None:
    tokens = write_megatron(tmp_path / "in", lines_of=lambda lines: [*lines, '{"step": 2, "lay'])
    trace = open_trace(import_megatron(tmp_path / "in", tmp_path / "out", E, ep_size=2, sequence_length=3))
    assert trace.info.source == "megatron"
    assert trace.info.num_layers == 3
    assert trace.steps() == [1, 2]
    for (rank, step, microbatch, layer), ids in tokens.items():
        assert trace.load(step + 1, layer, microbatch).load_PE[rank].tolist() == histogram(ids)
    rows = [r for r in trace.sequences((2, 2), layer=1).to_pylist() if (r["rank"], r["microbatch"]) == (1, 0)]
    ids = tokens[1, 1, 0, 1]
    assert [r["counts"] for r in rows] == [histogram(ids[:3]), histogram(ids[3:])]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda lines: ["not json\n"], "line 1 is no record"),
        (lambda lines: ['{"step": 0}\n'], "line 1 is no record.*layer"),
        (lambda lines: [], "no records"),
        (lambda lines: [lines[0].replace("[[", "[[9, 9], [")], "experts 0 to 9; expected 0 to 5"),
    ],
)
def test_files_that_are_no_router_trace(tmp_path: Path, spoil, message: str) -> None:
    write_megatron(tmp_path / "in", lines_of=spoil)
    with pytest.raises(TraceError, match=message):
        import_megatron(tmp_path / "in", tmp_path / "out", E, ep_size=2, sequence_length=3)


def test_ranks_that_disagree_or_are_missing(tmp_path: Path) -> None:
    write_megatron(tmp_path / "in")
    with pytest.raises(TraceError, match=r"lacks router_trace_rank2\.jsonl"):
        import_megatron(tmp_path / "in", tmp_path / "out", E, ep_size=3, sequence_length=3)
    with pytest.raises(ConfigError, match="7 experts cannot be split"):
        import_megatron(tmp_path / "in", tmp_path / "out", 7, ep_size=2, sequence_length=3)
    with pytest.raises(TraceError, match="experts 0 to 5; expected 0 to 1"):
        import_megatron(tmp_path / "in", tmp_path / "out", 2, ep_size=2, sequence_length=3)
    text = (tmp_path / "in" / "router_trace_rank1.jsonl").read_text()
    (tmp_path / "in" / "router_trace_rank1.jsonl").write_text(text.replace('"layer": 4', '"layer": 5'))
    with pytest.raises(TraceError, match="disagree on steps or layers"):
        import_megatron(tmp_path / "in", tmp_path / "out2", E, ep_size=2, sequence_length=3)


def test_routed_experts_of_an_engine(tmp_path: Path) -> None:
    lengths = [4, 1, 7, 3, 5]
    requests = [choices(number, length, 3) for number, length in enumerate(lengths)]
    for number, ids in enumerate(requests):
        ids[:, 0] = 0  # a dense layer
        np.save(tmp_path / f"{number}.npy", ids.astype(np.int32))
    arrays = load_routed_experts(tmp_path)
    trace = open_trace(import_routed_experts(arrays, tmp_path / "out", E, ep_size=2, sequences_per_rank=1))
    assert trace.info.num_layers == 2
    assert trace.steps() == [1, 2], "the fifth request fills no step"
    assert trace.load(2, 1).load_PE.tolist() == [histogram(requests[2][:, 2]), histogram(requests[3][:, 2])]
    (block,) = trace_loads(trace, 3)  # from sequences
    assert block.load_NPE[0, 2].tolist() == histogram(requests[2][:, 1])


def test_routed_experts_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"float64 \(2, 3\)"):
        import_routed_experts([np.ones((2, 3))], tmp_path / "out", E, 1, 1)
    with pytest.raises(TraceError, match="1 requests, of which one step needs 4"):
        import_routed_experts([choices(0, 4, 1)], tmp_path / "out", E, 2, 2)
    with pytest.raises(TraceError, match=r"there are no \.npy files"):
        list(load_routed_experts(tmp_path))
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(TraceError, match="not a plain numpy array"):
        list(load_routed_experts(tmp_path))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(TraceError, match="is not empty"):
        import_routed_experts([choices(0, 4, 1)], tmp_path / "full", E, 1, 1)


def write_flame(folder: Path, iteration: int, layers=(2, 3), tokens: int = 25, column: str = "indices") -> dict:
    found = {}
    (folder / "actives" / f"iter_{iteration:04d}").mkdir(parents=True)
    for layer in layers:
        ids = choices(iteration + layer, tokens)
        found[layer] = ids
        table = pa.table({"scores": ids.tolist(), column: pa.array(ids.tolist(), pa.list_(pa.int16()))})
        pq.write_table(table, folder / "actives" / f"iter_{iteration:04d}" / f"layer_{layer:02d}.parquet")
    return found


def test_flame_moes_traces(tmp_path: Path) -> None:
    written = {iteration: write_flame(tmp_path / "in", iteration) for iteration in (540, 1080)}
    out = import_flame_moe(tmp_path / "in", tmp_path / "out", 2, 2, num_experts=E, sequence_length=3, max_steps=5)
    trace = open_trace(out)
    assert trace.steps() == [540, 1080]
    assert sorted(set(trace.layers(["microbatch"])["microbatch"].to_pylist())) == [0, 1], "12 tokens each"
    ids = written[1080][3][12:24]
    assert trace.load(1080, 1, microbatch=1).load_PE.tolist() == [histogram(ids[:6]), histogram(ids[6:])]


def test_flame_moe_folders_that_cannot_be(tmp_path: Path) -> None:
    def read(folder: Path) -> None:
        import_flame_moe(folder, tmp_path / "out", 2, 2, num_experts=E, sequence_length=3)

    with pytest.raises(TraceError, match="no actives/iter_<n>"):
        read(tmp_path)
    write_flame(tmp_path / "few", 1, tokens=11)
    with pytest.raises(TraceError, match="fewer than 12 tokens"):
        read(tmp_path / "few")
    write_flame(tmp_path / "other", 1, column="experts")
    with pytest.raises(TraceError, match="no column 'indices'"):
        read(tmp_path / "other")
    write_flame(tmp_path / "cut", 1)
    file = tmp_path / "cut" / "actives" / "iter_0001" / "layer_03.parquet"
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(TraceError, match="cannot be read"):
        read(tmp_path / "cut")
