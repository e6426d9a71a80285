"""Post-training on one rank: a step generates groups of answers, rewards them, and learns from them.

Trainer and engine have the same processes by turns (`serve/cycle.py`). All else is the trainer's own: optimizer,
checkpoints, metrics, balancing, the clean stop.

Shapes: B answers of a microbatch, S tokens.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from equipoise.data import IGNORED_LABEL, Batch
from equipoise.distributed.collectives import all_reduce_sum
from equipoise.distributed.world import World
from equipoise.errors import NonFiniteLossError
from equipoise.posttrain.generate import Answerer, Answers, Asked, sampling_seed
from equipoise.posttrain.policy import STATISTICS, PolicyObjective, group_advantages
from equipoise.posttrain.prompts import Problem, ProblemLoader, ProblemSet
from equipoise.posttrain.rewards import Reward
from equipoise.serve.cycle import TrainAndGenerate
from equipoise.serve.engine import EngineConfig
from equipoise.train.config import TrainConfig
from equipoise.train.record import StepRecorder
from equipoise.train.rollout import Rollout, Sample, collate_samples
from equipoise.train.step import StepResult, run_model
from equipoise.train.stop import StopSignals
from equipoise.train.timing import StepTimes
from equipoise.train.trainer import Trainer

logger = logging.getLogger(__name__)

LENGTH_MULTIPLE = 64
"""Sequences are padded to the next multiple of so many tokens above the step's longest."""
_CHUNK = 512
_NOT_MEANT = ("mfu", "assumed_peak_flops", "assumed_peak_source")  # a step is not the training of its tokens alone


class _Microbatch(NamedTuple):
    batch: Batch
    rollout: Rollout
    advantages_B: torch.Tensor


@dataclass(frozen=True)
class _Update:
    """One optimizer update of a step: this rank's microbatches (as many on every rank) and the tokens of all ranks."""

    microbatches: list[_Microbatch]
    num_tokens: int


class PosttrainTrainer(Trainer):
    """`Trainer` whose steps generate what they learn from. Every method is collective."""

    loader: ProblemLoader

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        problems: ProblemSet,
        reward: Reward,
        run_dir: Path,
        stop: StopSignals,
    ) -> None:
        assert config.posttrain is not None
        self.problems, self.settings = problems, config.posttrain
        super().__init__(config, world, None, run_dir, stop)
        slots = self.settings.max_running_requests
        engine = EngineConfig(
            max_running_requests=slots,
            context_length=config.train.sequence_length,
            chunked_prefill_size=max(_CHUNK, slots),
        )
        cycle = TrainAndGenerate(
            world, self.model, self.optimizer, config.model, engine, self.dtype, holders=[self.meshes]
        )
        settings = self.settings
        self.answerer = Answerer(world, cycle, problems.tokenizer, reward, settings.reward, settings.max_new_tokens)
        logger.info(
            "post-training: %d prompts, %d held out; %d answers to each of %d prompts in a step; reward %s",
            problems.train.num_sequences,
            problems.held_out.num_sequences,
            settings.num_generations,
            config.train.global_batch_size // settings.num_generations,
            settings.reward,
        )

    def _make_loader(self) -> ProblemLoader:
        loop = self.config.train
        prompts = loop.global_batch_size // self.settings.num_generations
        return ProblemLoader(self.problems.train, prompts, loop.seed, self.config.data.shuffle)

    def _can_capture(self) -> bool:
        """Microbatches with recorded experts are launched."""
        return False

    def _learn(self, step: int, lr: float) -> StepResult:
        with self.timer.phase("data"):
            problems: list[Problem] = self.loader.next_problems()
        group, size = self.settings.num_generations, self.config.train.global_batch_size
        share = size // self.world.size
        seed = self.config.train.seed
        asked = [
            Asked(number, problems[number // group], sampling_seed(seed, step, number))
            for number in range(self.world.rank * share, (self.world.rank + 1) * share)
        ]
        with self.world.operation("generate"):
            answers = self.answerer.answer(asked, str(step - 1), self.settings.temperature, record=True)
        advantages, has_signal = group_advantages(answers.rewards, group, self.settings.scale_rewards)
        trained = [
            has_signal[number // group] and not (self.settings.mask_truncated and answers.is_truncated[number])
            for number in range(size)
        ]
        updates = [
            self._plan_update(answers, advantages, [n for n in range(size) if trained[n] and self._turn(n) == turn])
            for turn in range(self.settings.updates_per_step)
        ]
        made = [update for update in updates if update.num_tokens]
        old = [self._logprobs(update) for update in made] if len(made) > 1 else [None]
        sums: dict[str, torch.Tensor] = {}
        results: list[StepResult] = []
        for number, update in enumerate(made):
            results.append(self._update(update, old[number], lr, sums))
            if not results[-1].is_finite:
                break
        if not made:
            results.append(self._no_update(updates[0]))
        further = self._answer_metrics(answers, has_signal, trained) | self._policy_metrics(sums)
        return replace(_merged(results), further=further)

    def _turn(self, number: int) -> int:
        """The update that an answer is for: groups take turns, so that every rank has answers for each."""
        return number // self.settings.num_generations % self.settings.updates_per_step

    def _plan_update(self, answers: Answers, advantages: Sequence[float], numbers: Sequence[int]) -> _Update:
        """`numbers`: of all ranks' answers, those to learn from. A rank that has none takes part with padding."""
        limit = self.config.train.sequence_length
        length = min(limit, -(-(answers.longest - 1) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)
        share, rows = self.config.train.global_batch_size // self.world.size, self.plan.micro_batch_size
        counts = np.bincount([number // share for number in numbers], minlength=self.world.size)
        mine = [number for number in numbers if number in answers.own]
        microbatches = []
        for first in range(0, max(1, int(counts.max())), rows):
            chosen = mine[first : first + rows]
            samples: list[Sample | None] = [answers.own[number] for number in chosen]
            batch, rollout = collate_samples(samples or [None], length, self.config.model, self.settings.temperature)
            if not self.settings.replay_routes:
                rollout = replace(rollout, replay=None)
            mean = torch.tensor([advantages[number] for number in chosen] or [0.0], dtype=torch.float32)
            microbatches.append(_Microbatch(batch, rollout, mean))
        return _Update(microbatches, sum(answers.num_tokens[number] for number in numbers))

    def _logprobs(self, update: _Update) -> list[torch.Tensor]:
        """Of each microbatch's labels by the weights of now."""
        found = []
        batches, rollouts = [m.batch for m in update.microbatches], [m.rollout for m in update.microbatches]
        valid, recorded = self.step_runner.prepare_rollouts(batches, rollouts)
        with self.world.operation("log-probabilities before the updates"), self._inference():
            for number, batch in enumerate(batches):
                rollout = recorded[number]
                if rollout.replay is not None:  # plans that are made ahead are for a forward with a backward
                    rollout = replace(rollout, replay=replace(rollout.replay, is_complete=False))
                output = run_model(self.model, batch, self.world.device, number, rollout, valid[number], True)
                assert output.logprobs_BS is not None
                found.append(output.logprobs_BS)
        return found

    def _update(
        self, update: _Update, old: list[torch.Tensor] | None, lr: float, sums: dict[str, torch.Tensor]
    ) -> StepResult:
        device, microbatches = self.world.device, update.microbatches
        objective = PolicyObjective(
            self.settings,
            advantages=[m.advantages_B.to(device) for m in microbatches],
            counted=[(m.batch.labels != IGNORED_LABEL).to(device) for m in microbatches],
            engine=[_engine_logprobs(m.rollout).to(device) for m in microbatches],
            old=old,
            sums=sums,
        )
        losses, counts_NLE = self.step_runner.forward_backward(
            [m.batch for m in microbatches], update.num_tokens, [m.rollout for m in microbatches], objective
        )
        with self.timer.phase("optimizer"):
            return self.step_runner.finish(
                losses, counts_NLE, update.num_tokens, lr, bool(self.stop.requested), self.saver.progress
            )

    def _no_update(self, update: _Update) -> StepResult:
        """Where no group has a signal: the ranks agree on what they agree on in every step, and nothing changes."""
        microbatches = update.microbatches
        losses, counts_NLE = self.step_runner.forward_backward(
            [m.batch for m in microbatches], 1, [m.rollout for m in microbatches], lambda _, output: _nothing(output)
        )
        result, _ = self.step_runner.reduce(losses, counts_NLE, 0, bool(self.stop.requested), self.saver.progress)
        self.optimizer.zero_grad()
        return result

    def _answer_metrics(
        self, answers: Answers, has_signal: Sequence[bool], trained: Sequence[bool]
    ) -> dict[str, float]:
        rewards, lengths = np.array(answers.rewards), np.array(answers.num_tokens)
        seconds = self.answerer.seconds()
        return {
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "groups_with_signal": float(np.mean(has_signal)),
            "answers_trained": float(np.mean(trained)),
            "answer_tokens_mean": float(lengths.mean()),
            "answer_tokens_max": float(lengths.max()),
            "truncated": float(np.mean(answers.is_truncated)),
            **seconds,
            "generated_tokens_per_second": float(lengths.sum()) / max(seconds["time_generate_s"], 1e-9),
        }

    def _policy_metrics(self, sums: dict[str, torch.Tensor]) -> dict[str, float]:
        if not sums:
            return {}
        values = all_reduce_sum([sums[name] for name in STATISTICS], self.world.group)
        found = dict(zip(STATISTICS, torch.stack(values).tolist()))
        tokens = found["tokens"]
        return {
            "entropy": found["entropy"] / tokens,
            "clipped": found["clipped"] / tokens,
            "importance_mean": found["importance"] / tokens,
            "importance_capped": found["capped"] / tokens,
            "policy_kl": found["policy_kl"] / tokens,
        }

    def _refuse_step(self, step: int, result: StepResult, loader_state: dict[str, Any]) -> None:
        if self.settings.updates_per_step == 1:
            super()._refuse_step(step, result, loader_state)
        self._log_waiting()
        raise NonFiniteLossError(
            f"step {step}: the loss is {result.loss} and the gradient norm {result.grad_norm} in one of its "
            f"{self.settings.updates_per_step} updates (posttrain.updates_per_step). Earlier ones may have been made, "
            "so nothing is saved: run again with --resume, from the last checkpoint, with a lower optimizer.lr"
        )

    def evaluate(self) -> dict[str, float]:
        """Mean reward of the most likely answers to held-out prompts. Empty without any."""
        held, world = self.problems.held_out.problems, self.world
        count = min(self.config.train.eval_sequences, len(held))
        if not count:
            return {}
        chosen = [held[number * len(held) // count] for number in range(count)]
        asked = [Asked(number, chosen[number]) for number in range(world.rank, count, world.size)]
        with world.operation(f"step {self.step}: evaluation", deadline_s=10 * world.timeout_s):
            answers = self.answerer.answer(asked, f"evaluation-{self.step}", 0.0, record=False)
        return {
            "eval_reward": float(np.mean(answers.rewards)),
            "eval_answer_tokens_mean": float(np.mean(answers.num_tokens)),
            "eval_truncated": float(np.mean(answers.is_truncated)),
        }

    def _record(self, recorder: StepRecorder, result: StepResult, lr: float, times: StepTimes) -> dict[str, Any]:
        record = super()._record(recorder, result, lr, times)
        return {name: value for name, value in record.items() if name not in _NOT_MEANT}


def _engine_logprobs(rollout: Rollout) -> torch.Tensor:
    assert rollout.logprobs_BS is not None
    return rollout.logprobs_BS


def _nothing(output: Any) -> torch.Tensor:
    return 0.0 * output.logprobs_BS.sum()


def _merged(results: Sequence[StepResult]) -> StepResult:
    """Of a step's updates: sums of what is counted, means of losses, what the first one found of the rollouts (later
    ones compare other weights), and the last one's word on the rest."""
    first, last = results[0], results[-1]
    if len(results) == 1:
        return last

    def mean(name: str) -> float:
        return float(np.mean([getattr(result, name) for result in results]))

    return replace(
        last,
        loss=mean("loss"),
        aux_loss=mean("aux_loss"),
        z_loss=mean("z_loss"),
        grad_norm=mean("grad_norm"),
        num_tokens=sum(result.num_tokens for result in results),
        counts_LE=torch.stack([result.counts_LE for result in results]).sum(0),
        rank_imbalance_L=torch.stack([result.rank_imbalance_L for result in results]).mean(0),
        rank_imbalance_max=max(result.rank_imbalance_max for result in results),
        rollout=first.rollout,
    )
