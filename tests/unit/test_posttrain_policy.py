"""Advantages and the clipped loss, against plain loops written from the papers' formulas."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.data import IGNORED_LABEL
from equipoise.models.cross_entropy import _CHUNK_ELEMENTS, label_logprobs
from equipoise.posttrain.policy import STATISTICS, PolicyObjective, group_advantages, policy_loss
from equipoise.posttrain_config import PosttrainConfig
from equipoise.train.rollout import Sample, collate_samples
from unit.engine_rig import TOY, some_ids, trainer_model
from unit.test_rollout import runner_of

NAN = float("nan")


@pytest.mark.parametrize(
    ("rewards", "size", "scale", "wanted", "signal"),
    [
        ([1, 0, 0, 1], 4, True, [1, -1, -1, 1], [True]),
        ([1, 0, 0, 0], 4, True, [3**0.5, *[-(3**-0.5)] * 3], [True]),
        ([1, 0, 0, 0], 4, False, [0.75, -0.25, -0.25, -0.25], [True]),
        ([2, 2, 5, 7], 2, True, [0, 0, -1, 1], [False, True]),
        ([0.1 + 0.2, 0.3], 2, True, [0, 0], [False]),  # equal but for rounding
        ([3, 4], 1, True, [0, 0], [False, False]),  # groups of one
        ([-1e6, 1e6], 2, False, [-1e6, 1e6], [True]),
    ],
)
def test_advantages_are_rewards_relative_to_their_group(rewards, size, scale, wanted, signal) -> None:
    found, has_signal = group_advantages(rewards, size, scale)
    assert found == pytest.approx(wanted)
    assert has_signal == signal


def token_loss(new: float, old: float, engine: float, advantage: float, config: PosttrainConfig) -> tuple[float, float]:
    """A token's loss, and its derivative in the new log-probability, by cases."""
    ratio = math.exp(new - old)
    weight = 1.0 if math.isnan(engine) else math.exp(old - engine)
    weight = 1.0 if config.importance_cap is None else min(weight, config.importance_cap)
    if advantage > 0 and ratio > 1 + config.clip_high:
        return -weight * (1 + config.clip_high) * advantage, 0.0
    if advantage < 0 and ratio < 1 - config.clip_low:
        return -weight * (1 - config.clip_low) * advantage, 0.0
    return -weight * ratio * advantage, -weight * ratio * advantage


@pytest.mark.parametrize("cap", [2.0, None])
def test_loss_and_gradient_of_every_token_are_those_of_the_formula(cap: float | None) -> None:
    config = PosttrainConfig(clip_low=0.2, clip_high=0.3, importance_cap=cap)
    generator = torch.Generator().manual_seed(0)
    new, old, engine = torch.randn(3, 5, 40, generator=generator, dtype=torch.float64) * 0.4 - 2
    engine[0, :7] = NAN
    advantages = torch.tensor([1.5, -0.7, 0.0, 2.0, -1.0], dtype=torch.float64)
    counted = torch.rand(5, 40, generator=generator) < 0.7
    counted[3] = False  # an answer that is all padding
    logprobs = new.clone().requires_grad_()
    loss, sums = policy_loss(logprobs, old, engine, advantages, counted, config)
    loss.backward()
    total, clipped = 0.0, 0
    for b in range(5):
        for s in range(40):
            value, derivative = 0.0, 0.0
            if counted[b, s]:
                row = [float(x[b, s]) for x in (new, old, engine)]
                value, derivative = token_loss(*row, float(advantages[b]), config)
                clipped += derivative == 0 and advantages[b] != 0
            total += value
            assert float(logprobs.grad[b, s]) == pytest.approx(derivative, abs=1e-12)
    assert loss.item() == pytest.approx(total)
    assert 0 < clipped == int(sums["clipped"])
    assert int(sums["tokens"]) == int(counted.sum())
    difference = (new - old)[counted]
    assert float(sums["policy_kl"]) == pytest.approx(float((difference.exp() - 1 - difference).sum()))
    over = ((old - engine).exp() > 2)[counted].sum()
    assert int(sums["capped"]) == (0 if cap is None else int(over))


def test_what_is_padding_may_hold_anything() -> None:
    """Unknown and infinite values where nothing counts give neither a loss nor a gradient that is no number."""
    logprobs = torch.zeros(1, 3, requires_grad=True)
    other = torch.tensor([[NAN, float("-inf"), 0.0]])
    counted = torch.tensor([[False, False, True]])
    loss, sums = policy_loss(logprobs, other, other, torch.ones(1), counted, PosttrainConfig())
    loss.backward()
    assert loss.item() == -1
    assert logprobs.grad.tolist() == [[0, 0, -1]]
    assert all(math.isfinite(value) for value in sums.values())


@pytest.mark.parametrize("chunk", [1 << 26, 23])
def test_logprobs_with_a_gradient_equal_the_plain_ones(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setitem(_CHUNK_ELEMENTS, "cpu", chunk)  # two rows at a time
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([3, IGNORED_LABEL, 0, 10, 5, IGNORED_LABEL, 1])
    x, weight = torch.randn(7, 4, generator=generator), torch.randn(11, 4, generator=generator)
    coefficients = torch.randn(7, generator=generator)
    found, wanted = [], []
    for results, is_plain in ((found, False), (wanted, True)):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        if is_plain:
            valid = labels >= 0
            distribution = torch.distributions.Categorical(logits=a @ b.T / 0.7)
            logprobs = torch.where(valid, distribution.log_prob(labels.clamp(min=0)), 0.0)
            entropy = torch.where(valid, distribution.entropy(), 0.0).detach()
        else:
            logprobs, entropy = label_logprobs(a, b, labels, 0.7)
            assert not entropy.requires_grad
        (coefficients * logprobs).sum().backward()
        results += [logprobs.detach(), entropy, a.grad, b.grad]
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def reference_gradients(model, samples, advantages, old, config, temperature, num_tokens) -> dict[str, Any]:
    """By one sample at a time, from whole logits."""
    model.zero_grad()
    total = torch.zeros(())
    for sample, advantage, before in zip(samples, advantages, old):
        ids = torch.tensor([sample.ids])
        logits = model(ids).logits[0, sample.num_prompt - 1 : -1] / temperature
        for row, (token, engine) in enumerate(zip(sample.ids[sample.num_prompt :], sample.logprobs)):
            new = logits[row].log_softmax(-1)[token]
            reference = new.detach() if before is None else before[row]
            ratio = (new - reference).exp()
            bounded = min(max(ratio.item(), 1 - config.clip_low), 1 + config.clip_high)
            weight = min(math.exp(float(reference) - engine), config.importance_cap)
            is_clipped = bounded * advantage < ratio.item() * advantage
            total = total - weight * (bounded * advantage if is_clipped else ratio * advantage)
    (total / num_tokens).backward()
    return {"loss": total.item() / num_tokens} | {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("first_update", [True, False])
def test_a_step_makes_the_gradients_of_the_plain_loss(first_update: bool) -> None:
    """Over two microbatches, one with padding; answers of one token and of several."""
    model_config = TOY.model_copy(update={"router_aux_loss_coef": 0.0})
    model = trainer_model(model_config).train()
    config, temperature = PosttrainConfig(), 0.7
    generator = np.random.default_rng(0)
    samples, old = [], []
    for length, answer in ((3, 4), (5, 1), (2, 6)):
        ids = some_ids(length + answer)
        drawn = model(torch.tensor([ids])).logits[0, length - 1 : -1].detach() / temperature
        exact = drawn.log_softmax(-1).gather(1, torch.tensor(ids[length:])[:, None])[:, 0]
        samples.append(Sample(ids, length, (exact + 0.5 * torch.from_numpy(generator.normal(size=answer))).tolist()))
        old.append(None if first_update else exact + 0.3 * torch.from_numpy(generator.normal(size=answer)).float())
    advantages = [1.2, -0.7, -0.4]
    wanted = reference_gradients(model, samples, advantages, old, config, temperature, num_tokens=11)
    model.zero_grad()
    parts = [([samples[0], samples[1]], [0, 1]), ([samples[2], None], [2])]
    collated = [collate_samples(part, 9, model_config, temperature) for part, _ in parts]
    counted = [batch.labels != IGNORED_LABEL for batch, _ in collated]
    before = None
    if not first_update:
        before = [torch.zeros(2, 9), torch.zeros(2, 9)]
        for (_, numbers), part, mask in zip(parts, before, counted):
            for row, number in enumerate(numbers):
                part[row, mask[row]] = old[number]
    sums: dict[str, torch.Tensor] = {}
    objective = PolicyObjective(
        config,
        [torch.tensor([*(advantages[n] for n in numbers), 0.0][:2]) for _, numbers in parts],
        counted,
        [rollout.logprobs_BS for _, rollout in collated],
        before,
        sums,
    )
    runner = runner_of(model)
    losses, _ = runner.forward_backward([b for b, _ in collated], 11, [r for _, r in collated], objective)
    assert float(losses["loss"]) == pytest.approx(wanted["loss"], rel=1e-4)
    assert float(sums["tokens"]) == 11
    assert set(sums) == set(STATISTICS)
    assert (float(sums["clipped"]) > 0) == (not first_update)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-6)
