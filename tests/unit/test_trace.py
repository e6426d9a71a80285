"""`equipoise trace`: counts are those of the router, the prediction is the planner's, and the load file can be read."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from equipoise.balance.bounds import rank_load
from equipoise.cli import main
from equipoise.errors import ConfigError, DataError
from equipoise.trace.collect import Traced, collect, load_model, read_sequences
from equipoise.trace.predict import PAYS, group_loads, predict
from equipoise.trace.report import layer_table, prediction_table, verdicts

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"vocab_size": 260, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
EXPERTS, TOP_K = 8, 2


def qwen(**changes: Any) -> Any:
    torch.manual_seed(0)
    values = {"num_key_value_heads": 1, "head_dim": 8, "moe_intermediate_size": 24, "num_experts": EXPERTS}
    config = transformers.Qwen3MoeConfig(
        **(SIZES | values | {"num_experts_per_tok": TOP_K, "mlp_only_layers": [1], "intermediate_size": 20} | changes)
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.mul_(20)
    return model


def text(path: Path) -> str:
    path.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    return str(path)


def test_counts_are_the_routers_choice(tmp_path: Path) -> None:
    model = qwen()
    sequences = read_sequences(text(tmp_path / "a.txt"), None, "bytes", 33, 5)
    traced = collect(model, sequences, 2, CPU)
    logits = model(torch.from_numpy(sequences), output_router_logits=True).router_logits
    want = [
        torch.nn.functional.one_hot(layer.topk(TOP_K).indices.view(5, -1), EXPERTS).sum(1).numpy() for layer in logits
    ]
    np.testing.assert_array_equal(traced.counts_LNE, np.stack(want))
    assert traced.layers == ("model.layers.0.mlp.experts", "model.layers.2.mlp.experts")
    assert traced.num_experts_per_tok == TOP_K
    assert traced.expert_parameters == 3 * 16 * 24
    everything = sum(p.numel() for p in model.parameters())
    assert traced.dense_parameters == everything - 2 * EXPERTS * 3 * 16 * 24 - 260 * 16


def test_text_is_cut_from_its_beginning(tmp_path: Path) -> None:
    sequences = read_sequences(text(tmp_path / "a.txt"), None, "bytes", 10, 3)
    assert sequences.shape == (3, 10)
    assert bytes(sequences.ravel().astype(np.uint8)) == b"The quick brown fox jumps over"
    with pytest.raises(DataError, match=r"is too short: it has 2701 tokens, .*5000.*--sequence-length"):
        read_sequences(str(tmp_path / "a.txt"), None, "bytes", 5000, 3)


def traced_with(counts_LNE: np.ndarray, **changes: Any) -> Traced:
    names = tuple(f"model.layers.{i}.mlp.experts" for i in range(len(counts_LNE)))
    values = {
        "model_type": "toy",
        "layers": names,
        "counts_LNE": counts_LNE,
        "batch_size": 2,
        "sequence_length": 10,
        "num_experts_per_tok": 2,
        "expert_parameters": 100,
        "dense_parameters": 400,
        "hidden_size": 4,
        "dtype": "float32",
        "device": "cpu",
    }
    return Traced(**(values | changes))


def test_loads_of_any_number_of_ranks_come_from_sequences() -> None:
    counts_LNE = np.arange(2 * 7 * 4).reshape(2, 7, 4)
    load_LGE, samples = group_loads(counts_LNE, 3)
    assert samples == 2
    np.testing.assert_array_equal(load_LGE[1, 1], counts_LNE[1, 3:6].sum(0))
    scaled, samples = group_loads(counts_LNE, 14)
    assert samples == 0
    np.testing.assert_array_equal(scaled[:, 0], 2 * counts_LNE.sum(1))


def test_the_prediction_is_the_planners() -> None:
    counts_LNE = np.zeros((2, 4, 4), np.int64)
    counts_LNE[0, :] = [30, 10, 5, 5]  # ranks 40 and 10: 1.6 times the mean
    counts_LNE[1, :] = [13, 12, 12, 13]
    traced = traced_with(counts_LNE)
    found = predict(traced, 2, 20, slots=1, copy_tokens=0)
    assert found.samples == 1
    np.testing.assert_allclose(found.before_L, [1.6, 1.0])
    assert found.after == pytest.approx(1.0, abs=0.011)
    assert found.expert_gain == pytest.approx(1.3, abs=0.015)
    assert traced.expert_share == pytest.approx(0.5)
    assert found.step_gain(0.5) == pytest.approx((0.5 + 0.5 * 1.3) / 1.0, abs=0.01)
    costly = predict(traced, 2, 20, slots=1, copy_tokens=1000)
    assert costly.cost == pytest.approx(costly.before), "a copy that costs more than it saves is not made"
    assert predict(traced, 2, 20, slots=None, copy_tokens=0).slots == 1
    table = prediction_table(traced, [found])
    assert "1.30" in table
    assert "1.30 x faster" in table or "1.29 x faster" in table
    assert "30%" not in layer_table(traced, [found])
    (pays,), (not_,) = (verdicts(traced, [p], "toy") for p in (found, costly))
    assert pays == (
        "EP 2, 20 tokens per rank in a microbatch, a copy as 0 tokens of an expert (toy): balancing pays, a step would "
        "take 13% less time; with as uneven a load it pays with 1 tokens per rank too"
    )
    assert not_.startswith("EP 2, 20 tokens per rank in a microbatch, a copy as 1000 tokens of an expert (toy): ")
    assert "balancing does not pay; with as uneven a load it " in not_
    load = rank_load(torch.from_numpy(counts_LNE.sum(1)), 2)
    assert load.tolist() == [[160, 40], [100, 100]]


@pytest.mark.parametrize("tokens_per_rank", [1 << 16, 1 << 18, 1 << 20])
def test_the_turning_point_is_the_same_from_where_it_pays_and_from_where_it_does_not(tokens_per_rank: int) -> None:
    """Copies as costly as a small model's, of which a half as many tokens could not be counted in."""
    found = predict(traced_with(np.array([[[30, 10, 5, 5]]])), 2, tokens_per_rank, slots=1, copy_tokens=200_000)
    assert (found.step_gain(0.5) >= PAYS) == (tokens_per_rank > 1 << 16), found
    assert found.turn == f"with as uneven a load it pays from about {1 << 17} tokens per rank on", found


def test_an_ep_size_that_does_not_divide_the_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--ep 3 does not divide the 8 experts .* 2, 4, 8"):
        predict(traced_with(np.ones((1, 2, 8), np.int64)), 3, 20, 1, 0)


def test_models_that_cannot_be_traced_are_refused_by_name(tmp_path: Path) -> None:
    sequences = np.zeros((1, 8), np.int64)
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=20))
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM \(model type 'llama'\) has no MoE layer"):
        collect(dense, sequences, 1, CPU)
    with pytest.raises(DataError, match=r"ids up to 300, and qwen3_moe has 260 embeddings: .*--tokenizer"):
        collect(qwen(), sequences + 300, 1, CPU)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"transformers cannot load '.*empty' as a causal language model"):
        load_model(str(tmp_path / "empty"), CPU)
    qwen().save_pretrained(tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(ConfigError, match=r"transformers cannot load '.*cut' as a causal language model: .+ Give"):
        load_model(str(tmp_path / "cut"), CPU)
    with pytest.raises(DataError, match=r"the folder has no tokenizer\.json.*--tokenizer names another one"):
        read_sequences(text(tmp_path / "b.txt"), None, str(tmp_path / "cut"), 8, 1)


@pytest.mark.parametrize("name", ["nothere", "./nothere", "../nothere", "/no/where", "runs/a/b"])
def test_a_model_that_cannot_be_on_the_hub_is_answered_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.data.hub.unreachable_reason", lambda: pytest.fail("asked the network"))
    result = CliRunner().invoke(main, ["trace", name, "--data", "stdlib"])
    assert result.exit_code == 2
    assert f"there is no model '{name}': no such folder is here" in result.output


def test_without_a_network_a_hub_model_is_refused_without_its_client_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.data.hub.unreachable_reason", lambda: "the hub is away")
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: pytest.fail("asked the network"))
    with pytest.raises(DataError, match="model 'owner/nothere': the hub is away, and no copy is kept on this machine"):
        load_model("owner/nothere", CPU)


def test_the_command_prints_the_load_and_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from equipoise.observe.reader import open_trace
    from equipoise.simulate.loads import trace_loads

    monkeypatch.chdir(tmp_path)
    qwen().save_pretrained("toy")
    arguments = ["trace", "toy", "--data", text(tmp_path / "a.txt"), "--tokenizer", "bytes", "--ep", "2,4"]
    arguments += ["--batches", "3", "--batch-size", "2", "--sequence-length", "32", "--tokens-per-rank", "64"]
    for folder in ("toy", "toy-2"):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        assert f"traces/{folder}" in result.output
        assert "2 MoE layers of 8 experts, 2 per token; 6 sequences of 32 tokens" in result.output
        assert "EP 4" in result.output
        trace = open_trace(tmp_path / "traces" / folder)
        assert np.array(trace.sequences()["counts"].to_pylist()).sum(1).tolist() == [32 * TOP_K] * (2 * 6)
        assert (trace.info.moe_intermediate_size, trace.info.hidden_size) == (24, 16)
        (block,) = trace_loads(trace, 2)  # as `equipoise simulate` reads it: two sequences to each rank
        assert block.load_NPE.shape == (2, 2, EXPERTS)
        assert (block.load_NPE.sum(2) == 2 * 32 * TOP_K).all()
    said = [re.findall(r"EP \d, \d+ tokens per rank .*\(h200\): ", result.output)]
    for options in (["--tokens-per-rank", "64"], []):
        replayed = CliRunner().invoke(main, ["simulate", "traces/toy", "--ranks", "2,4", *options])
        assert replayed.exit_code == 0, replayed.output
        said.append(re.findall(r"EP \d, \d+ tokens per rank .*\(h200\): ", replayed.output))
    assert len(said[0]) == 2
    assert said[1] == said[0], "both say what the verdict is for, in the same words"
    assert said[2] == [line.replace(" 64 tokens", " 8192 tokens") for line in said[0]], "and take the same default"
    refused = CliRunner().invoke(main, [*arguments, "--out", "traces/toy"])
    assert refused.exit_code == 2
    assert "exists; give a folder that does not" in refused.output
    refused = CliRunner().invoke(main, [*arguments, "--out", "a.txt/here"])
    assert refused.exit_code == 2, "before the model is run"
    assert "a.txt cannot be made" in refused.output
    for option, value in (("--ep", "one"), ("--hardware", "abacus"), ("--copy-tokens", str(2**30))):
        assert CliRunner().invoke(main, [*arguments, option, value]).exit_code == 2
