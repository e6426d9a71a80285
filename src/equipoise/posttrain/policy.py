"""GRPO: advantages of the answers within a group, and the clipped loss of their tokens.

Sources: group-relative advantages, DeepSeekMath (arXiv 2402.03300); the clip range with two ends, the mean over all
tokens of a batch and groups without a signal left out, DAPO (arXiv 2503.14476); advantages without the division by the
standard deviation, Dr. GRPO (arXiv 2503.20783); truncated importance sampling (Ionides 2008), here between the engine's
probabilities and the trainer's.

Shapes: B sequences, S tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch

from equipoise.models.model import ModelOutput
from equipoise.posttrain_config import PosttrainConfig

EQUAL = 1e-8
"""Rewards of a group that differ by no more are equal: there is nothing to learn from it."""
STATISTICS = ("tokens", "clipped", "importance", "capped", "policy_kl", "entropy")
"""What `policy_loss` sums over the tokens that count, beside the loss."""


def group_advantages(rewards: Sequence[float], group_size: int, scale: bool) -> tuple[list[float], list[bool]]:
    """Advantages of answers that lie group by group, and which groups have a signal.

    An advantage is reward - mean of the group, with `scale` over the standard deviation (of the population). Where all
    rewards of a group are equal, also in a group of one, it is 0 and there is no signal.
    """
    groups = np.array(rewards, np.float64).reshape(-1, group_size)
    has_signal = np.ptp(groups, axis=1) > EQUAL
    advantages = groups - groups.mean(1, keepdims=True)
    if scale:
        advantages /= np.where(has_signal, groups.std(1), 1.0)[:, None]
    advantages[~has_signal] = 0.0
    return advantages.flatten().tolist(), has_signal.tolist()


def policy_loss(
    logprobs_BS: torch.Tensor,
    old_BS: torch.Tensor,
    engine_BS: torch.Tensor,
    advantages_B: torch.Tensor,
    counted_BS: torch.Tensor,
    config: PosttrainConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss summed over the tokens that count, and sums of `STATISTICS` but the entropy, without gradient.

    A token's loss is -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), where r is its probability over that before
    the step's updates and w the latter over the engine's, at most `importance_cap` (1 where the engine's is not known).

    Args:
        logprobs_BS: with gradient, by the weights of now.
        old_BS: by the trainer's weights before the step's updates.
        engine_BS: as recorded when the tokens were drawn; NaN where not known.
        advantages_B: of the answers.
        counted_BS: bool, the tokens of the answers.
    """
    A_B1 = advantages_B[:, None]
    change_BS = torch.where(counted_BS, logprobs_BS - old_BS, 0.0)
    ratio_BS = change_BS.exp()
    clipped_BS = ratio_BS.clamp(1 - config.clip_low, 1 + config.clip_high)
    gain_BS = torch.minimum(ratio_BS * A_B1, clipped_BS * A_B1)
    known_BS = counted_BS & ~engine_BS.isnan()
    importance_BS = torch.where(known_BS, old_BS - engine_BS, 0.0).exp()
    cap = config.importance_cap
    weight_BS = torch.ones_like(importance_BS) if cap is None else importance_BS.clamp(max=cap)
    loss = torch.where(counted_BS, -weight_BS * gain_BS, 0.0).sum()
    with torch.no_grad():
        sums = {
            "tokens": counted_BS,
            "clipped": counted_BS & (clipped_BS * A_B1 < ratio_BS * A_B1),
            "importance": torch.where(counted_BS, weight_BS, 0.0),
            "capped": counted_BS & (importance_BS > weight_BS) if cap is not None else torch.zeros_like(counted_BS),
            "policy_kl": ratio_BS - 1 - change_BS,
        }
        return loss, {name: values.double().sum() for name, values in sums.items()}


class PolicyObjective:
    """The loss of the microbatches of one update, as `TrainStep.forward_backward` takes it; its statistics add up in
    `sums`, on the device.

    advantages, labels, engine, old: of each microbatch, on the device, see `policy_loss`. old: None takes the
    log-probabilities of now, which are those of the first update.
    """

    def __init__(
        self,
        config: PosttrainConfig,
        advantages: Sequence[torch.Tensor],
        counted: Sequence[torch.Tensor],
        engine: Sequence[torch.Tensor],
        old: Sequence[torch.Tensor] | None,
        sums: dict[str, torch.Tensor],
    ) -> None:
        self.config, self.sums = config, sums
        self._advantages, self._counted, self._engine, self._old = advantages, counted, engine, old

    def __call__(self, number: int, output: ModelOutput) -> torch.Tensor:
        assert output.logprobs_BS is not None
        assert output.entropy_BS is not None
        old_BS = output.logprobs_BS.detach() if self._old is None else self._old[number]
        loss, found = policy_loss(
            output.logprobs_BS,
            old_BS,
            self._engine[number],
            self._advantages[number],
            self._counted[number],
            self.config,
        )
        found["entropy"] = output.entropy_BS.double().sum()  # 0 where nothing is counted
        for name, value in found.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        return loss
