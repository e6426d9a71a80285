"""Training steps on what an engine recorded: its experts are followed, and how far training is from it is measured."""

import numpy as np
import pytest
import torch

from equipoise.data import IGNORED_LABEL
from equipoise.errors import DataError
from equipoise.models.cross_entropy import cross_entropy_and_logprobs
from equipoise.serve.model import moe_layers
from equipoise.train.optimizer import OptimizerConfig, build_optimizer
from equipoise.train.rollout import ROUTER_COUNTS, Sample, collate_samples
from equipoise.train.step import TrainStep
from equipoise.train.timing import PhaseTimer
from unit.engine_rig import TOY, engine_of, generate, prompt, routes_of, some_ids, trainer_model

L, E, K = 2, TOY.num_experts, TOY.num_experts_per_tok
TEMPERATURE = 0.7


def answers(model, lengths=(5, 9, 1)) -> list[Sample]:
    """What an engine with the model's weights makes of prompts of these lengths."""
    prompts = [prompt(some_ids(n), f"{n}", max_new_tokens=3, temperature=TEMPERATURE) for n in lengths]
    results = generate(engine_of(model), *prompts)
    found = [(p.ids, results[p.rid]) for p in prompts]
    return [Sample(ids + r.output_ids, len(ids), r.output_logprobs, routes_of(r)) for ids, r in found]


def runner_of(model) -> TrainStep:
    from equipoise.accelerator import CPUAccelerator

    timer = PhaseTimer(CPUAccelerator())
    timer.start_step()
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
    return TrainStep(model, optimizer, None, torch.device("cpu"), timer, 0.0)  # type: ignore[arg-type]


def gradients(model) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_follows_the_engine_and_finds_no_gap_with_its_weights(recompute: str) -> None:
    model = trainer_model(TOY.model_copy(update={"router_aux_loss_coef": 0.0})).train()  # it would see padding
    for layer in model.model.layers:
        layer.recompute = recompute
    samples = answers(model)
    runner = runner_of(model)
    batch, rollout = collate_samples(samples, 12, TOY, TEMPERATURE)
    runner.forward_backward([batch, batch], 2 * batch.num_valid_tokens)
    wanted = gradients(model)
    sums, counts_NLE = runner.forward_backward([batch, batch], 2 * batch.num_valid_tokens, [rollout, rollout])
    rows = sum(len(sample.ids) - 1 for sample in samples)
    assert float(sums["replay_choices"]) == float(sums["replay_agreeing"]) == 2 * rows * L * K
    assert float(sums["gap_tokens"]) == 2 * 3 * len(samples)
    assert float(sums["gap_max"]) <= 1e-5
    assert counts_NLE.sum(-1).tolist() == [[rows * K] * L] * 2
    assert torch.equal(sums[ROUTER_COUNTS], counts_NLE.sum(0))
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-7)
    assert all(float(wanted[n].abs().sum()) > 0 for n, _ in model.named_parameters() if "gate.weight" in n)


def test_other_experts_are_followed_and_the_routers_own_choice_is_counted_beside() -> None:
    model = trainer_model().train()
    samples = answers(model)
    generator = np.random.default_rng(0)
    others = [
        s._replace(routes=np.stack([[generator.permutation(E)[:K] for _ in range(L)] for _ in s.ids[1:]]))
        for s in samples
    ]
    runner = runner_of(model)
    batch, rollout = collate_samples(others, 12, TOY, TEMPERATURE)
    sums, counts_NLE = runner.forward_backward([batch], batch.num_valid_tokens, [rollout])
    assert 0 < float(sums["replay_agreeing"]) < float(sums["replay_choices"])
    assert float(sums["gap_max"]) > 1e-3
    recorded = np.concatenate([s.routes for s in others])
    for layer in range(L):
        assert counts_NLE[0, layer].tolist() == np.bincount(recorded[:, layer].flatten(), minlength=E).tolist()
    batch, rollout = collate_samples(samples, 12, TOY, TEMPERATURE)
    own, own_NLE = runner.forward_backward([batch], batch.num_valid_tokens, [rollout])
    assert torch.equal(own[ROUTER_COUNTS], own_NLE[0])
    assert torch.equal(sums[ROUTER_COUNTS][0], own_NLE[0, 0])  # the first layer's router saw the same inputs
    assert all(float(layer.gate.weight.grad.abs().sum()) > 0 for layer in moe_layers(model))


def test_padding_and_rows_that_are_not_known() -> None:
    """R23: padding goes to no expert, in whatever layer; an unknown row is the router's."""
    model = trainer_model().train()
    samples = answers(model)
    part = [samples[0]._replace(routes=samples[0].routes[:4]), samples[1]._replace(routes=None), samples[2]]
    batch, rollout = collate_samples(part, 14, TOY, TEMPERATURE)
    assert not rollout.is_known(rollout.valid_BS)
    runner = runner_of(model)
    sums, counts_NLE = runner.forward_backward([batch], batch.num_valid_tokens, [rollout])
    assert float(sums["replay_choices"]) == float(sums["replay_agreeing"]) == (4 + len(samples[2].ids) - 1) * L * K
    assert counts_NLE.sum(-1).tolist() == [[sum(len(s.ids) - 1 for s in samples) * K] * L]
    whole, known = collate_samples(samples, 14, TOY, TEMPERATURE)
    assert known.is_known(known.valid_BS)
    assert torch.equal(whole.input_ids, batch.input_ids)


def test_without_logprobs_or_routes_the_rest_is_measured() -> None:
    model = trainer_model().train()
    samples = answers(model)
    runner = runner_of(model)
    for changes in ({"logprobs": None}, {"routes": None}):
        batch, rollout = collate_samples([s._replace(**changes) for s in samples], 12, TOY, TEMPERATURE)
        sums, _ = runner.forward_backward([batch], batch.num_valid_tokens, [rollout])
        assert (float(sums["gap_tokens"]) == 0) == ("logprobs" in changes)
        assert (float(sums["replay_choices"]) == 0) == ("routes" in changes)


def test_labels_are_the_tokens_of_the_output() -> None:
    batch, rollout = collate_samples([Sample([3, 4, 5, 6], 2, [-1.0, -2.0])], 5, TOY)
    assert batch.input_ids.tolist() == [[3, 4, 5, 0, 0]]
    assert batch.labels.tolist() == [[IGNORED_LABEL, 5, 6, IGNORED_LABEL, IGNORED_LABEL]]
    assert rollout.valid_BS.tolist() == [[True, True, True, False, False]]
    assert rollout.logprobs_BS.nan_to_num(9).tolist() == [[9, -1, -2, 9, 9]]
    assert (batch.num_valid_tokens, rollout.replay) == (2, None)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Sample([1, 2, 3], 3), "sample 0 has 3 tokens, 3 of them its prompt"),
        (Sample([1, 2, 3], 0), "expected a prompt"),
        (Sample([1] * 7, 2), "at most 6 in all"),
        (Sample([1, 2, 3], 1, [-1.0]), "1 log-probabilities for 2 tokens of output"),
        (Sample([1, 2, 3], 1, None, np.zeros((3, L, K), np.uint8)), "expected at most 2 rows"),
    ],
)
def test_samples_that_cannot_be_are_refused(sample: Sample, message: str) -> None:
    with pytest.raises(DataError, match=message):
        collate_samples([sample], 5, TOY)


def test_a_rollout_of_another_microbatch_is_refused() -> None:
    model = trainer_model().train()
    batch, rollout = collate_samples([Sample([1, 2, 3], 1)], 5, TOY)
    _, shorter = collate_samples([Sample([1, 2, 3], 1)], 4, TOY)
    runner = runner_of(model)
    with pytest.raises(DataError, match="collate both together"):
        runner.forward_backward([batch], 2, [shorter])
    with pytest.raises(DataError, match="1 rollouts for 2 microbatches"):
        runner.forward_backward([batch, batch], 2, [rollout])


@pytest.mark.parametrize("needs_grad", [True, False])
def test_logprobs_come_with_the_loss_at_the_temperature_that_was_asked_for(needs_grad: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(7, 4, generator=generator), torch.randn(11, 4, generator=generator)
    labels = torch.tensor([3, IGNORED_LABEL, 0, 10, 5, IGNORED_LABEL, 1])
    if needs_grad:
        x.requires_grad_()
    loss, logprobs = cross_entropy_and_logprobs(x, weight, labels, 0.5)
    wanted = (x.detach() @ weight.T / 0.5).log_softmax(-1)
    for token, label in enumerate(labels.tolist()):
        expected = 0.0 if label == IGNORED_LABEL else float(wanted[token, label])
        assert float(logprobs[token]) == pytest.approx(expected, abs=1e-5)
    assert not logprobs.requires_grad
    assert loss.requires_grad == needs_grad
    assert cross_entropy_and_logprobs(x, weight, labels, None)[1].numel() == 0
