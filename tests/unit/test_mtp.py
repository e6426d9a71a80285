"""Multi-token prediction against a plain form that cuts documents apart where the model masks them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distributed.parity import relative, toy_model
from equipoise.errors import ConfigError
from equipoise.models import cross_entropy
from equipoise.models.config import ModelConfig
from equipoise.models.initialize import initialize_model
from equipoise.models.model import IGNORED_LABEL, ModelOutput, MoEForCausalLM
from equipoise.train.config import LoopConfig, TrainConfig, plan_run

Weights = dict[str, torch.Tensor]

DOCUMENTS = {
    "one token": [[1]],
    "two tokens": [[2], [2]],
    "a stream": [[9], [9]],
    "packed": [[5, 1, 3], [2, 7]],
    "packed with padding": [[4, 1, 1], [2, 6], [0]],
}
"""Lengths of the documents in each sequence; what is missing up to the longest sequence is padding."""


def build(**changes) -> MoEForCausalLM:
    model = MoEForCausalLM(toy_model(**changes))
    initialize_model(model, seed=3)
    for name, parameter in model.named_parameters():  # norms start as constants: make them count
        if parameter.dim() == 1:
            torch.manual_seed(len(name))
            nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model


def batch(lengths: list[list[int]]) -> dict[str, torch.Tensor]:
    """Arguments of the model; packed ones number their documents 0, 1, 0, ..., which neighbours tell apart."""
    B, S = len(lengths), max(sum(row) for row in lengths)
    generator = torch.Generator().manual_seed(4)
    ids_BS = torch.randint(0, 61, (B, S), generator=generator)
    labels_BS = torch.randint(0, 61, (B, S), generator=generator)
    labels_BS[torch.rand(B, S, generator=generator) < 0.2] = IGNORED_LABEL
    documents_BS, positions_BS = torch.full((B, S), -1), torch.arange(S).repeat(B, 1)
    for row, sizes in enumerate(lengths):
        start = 0
        for number, size in enumerate(sizes):
            documents_BS[row, start : start + size] = number % 2
            positions_BS[row, start : start + size] -= start
            start += size
    labels_BS[documents_BS < 0] = IGNORED_LABEL
    values = {"input_ids_BS": ids_BS, "labels_BS": labels_BS, "valid_BS": documents_BS >= 0}
    if any(len(row) > 1 for row in lengths):
        values |= {"document_ids_BS": documents_BS, "position_ids_BS": positions_BS}
    return values


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotate(x_NSH: torch.Tensor, theta: float) -> torch.Tensor:
    half = x_NSH.shape[-1] // 2
    angles = torch.arange(x_NSH.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    a, b = x_NSH[..., :half], x_NSH[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def attention(w: Weights, x_SD: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    def heads(name: str) -> torch.Tensor:
        return (x_SD @ w[f"self_attn.{name}_proj.weight"].T).unflatten(1, (-1, config.head_dim)).transpose(0, 1)

    q = rotate(rms_norm(heads("q"), w["self_attn.q_norm.weight"]), config.rope_theta)
    k = rotate(rms_norm(heads("k"), w["self_attn.k_norm.weight"]), config.rope_theta)
    groups = config.num_attention_heads // config.num_key_value_heads
    k, v = k.repeat_interleave(groups, 0), heads("v").repeat_interleave(groups, 0)
    scores = q @ k.transpose(1, 2) / math.sqrt(config.head_dim)
    future = torch.ones(scores.shape[1:]).triu(1).bool()
    out = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
    return out.transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T


def feed_forward(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def experts(w: Weights, x_SD: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    rows = []
    for x in x_SD:
        scores = (w["mlp.gate.weight"] @ x).softmax(-1)
        y = feed_forward(x, *(w[f"mlp.shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")))
        for expert in scores.argsort(descending=True)[: config.num_experts_per_tok]:
            gate, up = w["mlp.experts.gate_up_proj"][expert].chunk(2)
            y = y + scores[expert] * feed_forward(x, gate, up, w["mlp.experts.down_proj"][expert])
        rows.append(y)
    return torch.stack(rows)


def one_depth(w: Weights, hidden_SD: torch.Tensor, embedded_SD: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Equations 21 and 22 of DeepSeek-V3's report and the norm before the output head, for one document."""
    joined = torch.cat([rms_norm(embedded_SD, w["enorm.weight"]), rms_norm(hidden_SD, w["hnorm.weight"])], -1)
    x_SD = joined @ w["eh_proj.weight"].T
    x_SD = x_SD + attention(w, rms_norm(x_SD, w["input_layernorm.weight"]), config)
    x_SD = x_SD + experts(w, rms_norm(x_SD, w["post_attention_layernorm.weight"]), config)
    return rms_norm(x_SD, w["shared_head.norm.weight"])


def reference(model: MoEForCausalLM, lengths: list[list[int]], given: dict) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The main loss, and that of each depth: documents cut out, and k tokens shorter at depth k. All are sums."""
    config, ids_BS, labels_BS = model.config, given["input_ids_BS"], given["labels_BS"]
    weights = dict(model.named_parameters())
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    places = [given.get(name) for name in ("position_ids_BS", "document_ids_BS", "valid_BS")]
    (hidden_BSD,), _ = model.model(ids_BS, *places)
    main = F.cross_entropy((hidden_BSD @ head.T).flatten(0, 1), labels_BS.flatten(), reduction="sum")
    losses = [torch.zeros(()) for _ in range(config.num_nextn_predict_layers)]
    for row, sizes in enumerate(lengths):
        start = 0
        for size in sizes:
            span = slice(start, start + size)
            ids_S, labels_S, hidden_SD = ids_BS[row, span], labels_BS[row, span], hidden_BSD[row, span]
            for depth in range(1, min(len(losses), size - 1) + 1):
                prefix = f"model.layers.{config.num_hidden_layers + depth - 1}."
                w = {name.removeprefix(prefix): p for name, p in weights.items() if name.startswith(prefix)}
                hidden_SD = one_depth(w, hidden_SD[: size - depth], embedding[ids_S[depth:]], config)
                logits_SV = hidden_SD @ head.T
                losses[depth - 1] = losses[depth - 1] + F.cross_entropy(logits_SV, labels_S[depth:], reduction="sum")
            start += size
    return main, losses


def gradients(model: MoEForCausalLM, loss: torch.Tensor) -> Weights:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(named, found))


@pytest.mark.parametrize(("tied", "recompute"), [(False, "none"), (True, "full")])
@pytest.mark.parametrize("depths", [1, 2])
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_loss_and_every_gradient(lengths: list[list[int]], depths: int, tied: bool, recompute: str) -> None:
    model = build(num_nextn_predict_layers=depths, tie_word_embeddings=tied)
    given = batch(lengths)
    main, losses = reference(model, lengths, given)
    ahead = sum(losses) / depths
    want = gradients(model, main + 0.3 * ahead)
    for layer in model.model.layers:
        layer.recompute = recompute
    output = model(**given)
    assert relative(output.loss_sum.detach(), main.detach()) <= 1e-5
    assert relative(output.mtp_loss_sum.detach(), ahead.detach()) <= 1e-5
    got = gradients(model, output.loss_sum + 0.3 * output.mtp_loss_sum)
    assert {name: d for name in want if not (d := relative(got[name], want[name])) <= 1e-5} == {}


def test_tokens_without_one_ahead_meet_no_expert() -> None:
    """Neither ends of documents nor padding count as load or reach the balance loss."""
    lengths = DOCUMENTS["packed with padding"]
    output = build(num_nextn_predict_layers=2, mlp_only_layers=())(**batch(lengths))
    per_layer = [int(routing.counts_E.sum()) // 3 for routing in output.routings]
    assert per_layer == [14, 14, 14, 3 + 1 + 5, 2 + 4]


@pytest.mark.parametrize(("length", "predicted"), [(1, 0), (2, 1)])
def test_where_nothing_can_be_predicted_the_loss_is_0_and_so_are_the_gradients(length: int, predicted: int) -> None:
    model = build(num_nextn_predict_layers=2, router_aux_loss_coef=0.01, router_z_loss_coef=0.01)
    ids_BS = torch.tensor([[5, 6]])[:, :length]
    output = model(ids_BS, ids_BS)
    routers = [routing.aux_loss + routing.z_loss for routing in output.routings]
    found = gradients(model, output.loss_sum + output.mtp_loss_sum + sum(routers))
    assert all(bool(gradient.isfinite().all()) for gradient in found.values())
    assert (float(output.mtp_loss_sum) != 0) == (predicted > 0)
    for depth in range(predicted, 2):
        assert float(routers[depth - 2]) == 0
        of_layer = {name: float(g.norm()) for name, g in found.items() if name.startswith(f"model.layers.{3 + depth}.")}
        assert set(of_layer.values()) == {0.0}


def test_parameters_have_the_names_of_deepseek_v3() -> None:
    """As in its released checkpoints: `model.layers.61.*` behind 61 layers. Embedding and head are there once."""
    off, on = set(build().state_dict()), set(build(num_nextn_predict_layers=2).state_dict())
    own = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    layer = {name.removeprefix("model.layers.2.") for name in off if name.startswith("model.layers.2.")}
    assert off < on
    assert on - off == {f"model.layers.{index}.{name}" for index in (3, 4) for name in layer | own}
    projection = build(num_nextn_predict_layers=1).state_dict()["model.layers.3.eh_proj.weight"]
    assert projection.shape == (32, 64)


def run(model: MoEForCausalLM, training: bool) -> ModelOutput:
    return model.train(training)(**batch(DOCUMENTS["packed"]))


def test_the_model_itself_is_the_one_without_bit_for_bit() -> None:
    """Its weights, its loss, and everything in evaluation, where the further layers do not run."""
    off, on = (MoEForCausalLM(toy_model(num_nextn_predict_layers=n)) for n in (0, 1))
    initialize_model(off, 3)
    initialize_model(on, 3)
    parameters = dict(on.named_parameters())
    assert all(torch.equal(p, parameters[name]) for name, p in off.named_parameters())
    assert run(off, True).mtp_loss_sum is None
    assert torch.equal(run(on, True).loss_sum, run(off, True).loss_sum)
    evaluated = run(on, False)
    assert torch.equal(evaluated.loss_sum, run(off, False).loss_sum)
    assert evaluated.mtp_loss_sum is None
    assert len(evaluated.routings) == len(run(off, False).routings)


def test_the_loss_in_chunks_equals_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main loss and those of the depths come one after the other, each in chunks."""
    model = build(num_nextn_predict_layers=2)
    whole = run(model, True)
    monkeypatch.setitem(cross_entropy._CHUNK_ELEMENTS, "cpu", 61 * 18)
    chunked = run(model, True)
    for loss, want in ((chunked.loss_sum, whole.loss_sum), (chunked.mtp_loss_sum, whole.mtp_loss_sum)):
        assert relative(loss.detach(), want.detach()) <= 1e-6


@pytest.mark.parametrize(
    ("dense", "step", "moe_layers"), [((), 1, (0, 1, 2, 3, 4)), ((2,), 1, (0, 1)), ((), 2, (1,)), ((0,), 3, (2, 3, 4))]
)
def test_further_layers_are_of_the_kind_of_the_last(dense: tuple, step: int, moe_layers: tuple) -> None:
    config = toy_model(num_nextn_predict_layers=2, mlp_only_layers=dense, decoder_sparse_step=step)
    assert config.moe_layers == moe_layers


@pytest.mark.parametrize(("key", "value"), [("num_nextn_predict_layers", -1), ("mtp_loss_coef", 0.0)])
def test_impossible_settings_are_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        ModelConfig(**{key: value})


def test_sequences_too_short_for_the_last_depth_are_refused() -> None:
    config = TrainConfig(model=ModelConfig(num_nextn_predict_layers=2), train=LoopConfig(sequence_length=2))
    with pytest.raises(ConfigError, match=r"num_nextn_predict_layers is 2 but train\.sequence_length is 2"):
        plan_run(config, 1)
    plan_run(config.model_copy(update={"train": LoopConfig(sequence_length=3)}), 1)
