"""Routing replay in one process: recorded ids are followed, the router's gradients flow, metrics say how far apart."""

import numpy as np
import pytest
import torch

from equipoise.errors import DataError
from equipoise.models.model import IGNORED_LABEL
from equipoise.moe.replay import agreement, collate_routes, logprob_gap
from equipoise.serve.model import moe_layers
from unit.engine_rig import TOY, engine_of, generate, prompt, routes_of, some_ids, trainer_model

L, E, K = 2, TOY.num_experts, TOY.num_experts_per_tok


def recorded(model, lengths=(5, 9, 1)):
    """Prompts with outputs that an engine made of this model, and their routes."""
    prompts = [prompt(some_ids(n), f"{n}", max_new_tokens=3) for n in lengths]
    results = generate(engine_of(model), *prompts)
    texts = [p.ids + results[p.rid].output_ids for p in prompts]
    return texts, [routes_of(results[p.rid]) for p in prompts], [results[p.rid] for p in prompts]


def batch(texts):
    """Inputs, labels and validity, padded at the end."""
    length = max(map(len, texts)) - 1
    inputs = torch.zeros(len(texts), length, dtype=torch.int64)
    labels = torch.full((len(texts), length), IGNORED_LABEL)
    for row, ids in enumerate(texts):
        inputs[row, : len(ids) - 1], labels[row, : len(ids) - 1] = torch.tensor(ids[:-1]), torch.tensor(ids[1:])
    return inputs, labels, labels != IGNORED_LABEL


def collate(routes, texts, length):
    return collate_routes(routes, [len(ids) - 1 for ids in texts], length, L, E, K)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_the_engines_routes_are_the_trainers_and_replaying_them_changes_nothing(recompute: str) -> None:
    model = trainer_model()
    for layer in model.model.layers:
        layer.recompute = recompute
    texts, routes, _ = recorded(model)
    inputs, labels, valid = batch(texts)
    replay = collate(routes, texts, inputs.shape[1])
    assert replay.is_complete
    assert replay.ids_LTK.dtype == torch.int8
    plain = model(inputs, labels, valid_BS=valid)
    plain.loss_sum.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    output = model(inputs, labels, valid_BS=valid, replay=replay)
    output.loss_sum.backward()
    assert float(agreement([r.replayed for r in output.routings])) == 1.0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-5, atol=1e-6)
    for layer in moe_layers(model):
        assert float(layer.gate.weight.grad.abs().sum()) > 0
    for routing, live in zip(output.routings, plain.routings):
        assert torch.equal(routing.counts_E, live.counts_E)
        assert torch.equal(routing.ids_TK < 0, live.ids_TK < 0)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_other_experts_are_followed_and_weighted_by_the_live_scores(recompute: str) -> None:
    """Forward and gradients against a router that cannot choose otherwise."""
    model = trainer_model()
    for layer in model.model.layers:
        layer.recompute = recompute
    texts, _, _ = recorded(model)
    inputs, labels, valid = batch(texts)
    generator = np.random.default_rng(0)
    routes = [np.stack([[generator.permutation(E)[:K] for _ in range(L)] for _ in ids[1:]]) for ids in texts]
    replay = collate(routes, texts, inputs.shape[1])
    output = model(inputs, labels, valid_BS=valid, replay=replay)
    output.loss_sum.backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    for index, routing in enumerate(output.routings):
        recorded_TK = replay.layer(index).ids_TK
        assert torch.equal(routing.ids_TK[valid.flatten()], recorded_TK[valid.flatten()])
        assert int(routing.counts_E.sum()) == int(valid.sum()) * K
        assert torch.equal(routing.router_counts_E, routing.replayed.live_counts_E)
    assert 0 < float(agreement([r.replayed for r in output.routings])) < 1

    model.zero_grad()
    handles = []
    for index, layer in enumerate(moe_layers(model)):  # the same choice through a bias that outweighs every score
        handles.append(_force(layer.gate, replay.layer(index).ids_TK))
    for layer in model.model.layers:
        layer.recompute = "none"
    model(inputs, labels, valid_BS=valid).loss_sum.backward()
    for undo in handles:
        undo()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-5)


def _force(router, ids_TK):
    class Forced:
        def choose(self, scores_TE, valid_T):
            return scores_TE + 10 * torch.zeros_like(scores_TE).scatter(1, ids_TK.long().clamp(min=0), 1.0), valid_T

    router.synthetic = Forced()
    return lambda: setattr(router, "synthetic", None)


def test_auxiliary_loss_sees_the_routers_own_choice() -> None:
    model = trainer_model(TOY.model_copy(update={"router_aux_loss_coef": 0.1}))
    texts, _, _ = recorded(model)
    inputs, labels, valid = batch(texts)
    one = np.arange(K)
    routes = [np.broadcast_to(one, (len(ids) - 1, L, K)).copy() for ids in texts]
    live = model(inputs, labels, valid_BS=valid)
    replayed = model(inputs, labels, valid_BS=valid, replay=collate(routes, texts, inputs.shape[1]))
    got, wanted = (output.routings[0].aux_loss.item() for output in (replayed, live))
    assert got == pytest.approx(wanted, rel=1e-6)
    assert torch.equal(replayed.routings[0].router_counts_E, live.routings[0].counts_E)
    assert replayed.routings[0].counts_E.tolist()[K:] == [0] * (E - K)


def test_rows_that_were_not_recorded_are_routed_live() -> None:
    model = trainer_model()
    texts, routes, _ = recorded(model)
    inputs, labels, valid = batch(texts)
    part = [routes[0][:2], None, routes[2]]
    replay = collate(part, texts, inputs.shape[1])
    assert not replay.is_complete
    output = model(inputs, labels, valid_BS=valid, replay=replay)
    live = model(inputs, labels, valid_BS=valid)
    for a, b in zip(output.routings, live.routings):
        assert torch.equal(a.ids_TK.sort().values, b.ids_TK.sort().values)
    choices = sum(int(r.replayed.num_choices) for r in output.routings)
    assert choices == (2 + len(routes[2])) * K * L


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (np.zeros((3, L, K), np.uint8), "name an expert twice"),
        (np.full((3, L, K), E, np.uint8), "expected 0 to 5"),
        (np.zeros((5, L, K), np.uint8), "expected at most 4 rows"),
        (np.zeros((3, L + 1, K), np.uint8), "of 2 MoE layers x 2 experts"),
        (np.zeros((3, K), np.uint8), "have shape"),
    ],
)
def test_routes_that_cannot_be_are_refused_with_their_sample(routes: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        collate_routes([None, routes], [4, 4], 4, L, E, K)
    assert "sample 1" in str(error.value)


@pytest.mark.parametrize(("num_experts", "dtype"), [(128, torch.int8), (256, torch.int16), (40_000, torch.int32)])
def test_the_smallest_dtype_that_also_holds_unknown(num_experts: int, dtype: torch.dtype) -> None:
    routes = np.arange(K)[None, None] + np.zeros((2, L, 1), np.int64) + num_experts - K
    replay = collate_routes([routes], [2], 3, L, num_experts, K)
    assert replay.ids_LTK.dtype == dtype
    assert replay.layer(0).ids_TK.tolist() == [[num_experts - 2, num_experts - 1]] * 2 + [[-1, -1]]


def test_the_gap_between_training_and_generation() -> None:
    model = trainer_model()
    texts, routes, results = recorded(model)
    inputs, _, valid = batch(texts)
    with torch.no_grad():
        logits = model(inputs, valid_BS=valid, replay=collate(routes, texts, inputs.shape[1])).logits / 0.7
    rollout, training = torch.zeros(inputs.shape), torch.zeros(inputs.shape)
    counted = torch.zeros(inputs.shape, dtype=torch.bool)
    for row, (ids, result) in enumerate(zip(texts, results)):
        first = len(ids) - 1 - len(result.output_ids)
        rollout[row, first : len(ids) - 1] = torch.tensor(result.output_logprobs)
        counted[row, first : len(ids) - 1] = True
        drawn = torch.tensor(ids[1:])[:, None]
        training[row, : len(ids) - 1] = logits[row, : len(ids) - 1].log_softmax(-1).gather(1, drawn)[:, 0]
    gap = logprob_gap(training, rollout, counted)
    assert float(gap.max_abs) <= 1e-5
    assert 0 <= float(gap.kl) <= 1e-9
    shifted = logprob_gap(training + 0.5, rollout, counted)
    assert float(shifted.mean_abs) == pytest.approx(0.5, abs=1e-5)
    assert float(shifted.kl) == pytest.approx(np.exp(0.5) - 1.5, abs=1e-4)
    assert logprob_gap(training, rollout, counted & False) == (0, 0, 0)
