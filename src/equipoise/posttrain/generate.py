"""Answers of a step: each rank generates its share, and every rank learns of all answers what decides the update."""

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from equipoise.data import Tokenizer
from equipoise.distributed.agree import gather_json, raise_together
from equipoise.distributed.world import World
from equipoise.errors import EquipoiseError
from equipoise.posttrain.prompts import Problem
from equipoise.posttrain.rewards import Reward, score
from equipoise.serve.cycle import TrainAndGenerate
from equipoise.serve.request import Finished, Prompt
from equipoise.train.rollout import Sample


class Asked(NamedTuple):
    """A problem to answer. number: among all answers of the step. seed: of sampling."""

    number: int
    problem: Problem
    seed: int = 0


@dataclass(frozen=True)
class Answers:
    """Of all ranks, by number, equal on every rank; and this rank's samples by their numbers."""

    rewards: list[float]
    num_tokens: list[int]
    is_truncated: list[bool]
    longest: int
    """Tokens of the longest prompt with its answer."""
    own: dict[int, Sample]


def sampling_seed(seed: int, step: int, number: int) -> int:
    """Of an answer: it depends on the run's seed, the step and the answer's number alone, not on the rank."""
    digest = blake2b(f"{seed}/{step}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Answerer:
    """Generates and rewards, with the weights that the trainer has. Collective."""

    def __init__(
        self,
        world: World,
        cycle: TrainAndGenerate,
        tokenizer: Tokenizer,
        reward: Reward,
        reward_name: str,
        max_new_tokens: int,
    ) -> None:
        self.world, self.cycle, self.tokenizer = world, cycle, tokenizer
        self.reward, self.reward_name, self.max_new_tokens = reward, reward_name, max_new_tokens
        self._reward_s = 0.0

    def answer(self, asked: Sequence[Asked], version: str, temperature: float, record: bool) -> Answers:
        """Answers to this rank's share of what is asked. `version`: of the weights. `record`: whether
        log-probabilities and experts are recorded.

        Raises:
            EquipoiseError: on every rank, if the model's output is not finite or the reward fails.
        """
        self.cycle.records.clear()
        prompts = [self._prompt(one, temperature, record) for one in asked]
        with self.cycle.generating(version):
            finished = self.cycle.generate(prompts)
        rows: list[list[float]] = []
        own: dict[int, Sample] = {}
        error: Exception | None = None
        started = time.perf_counter()
        with self.world.operation("reward"):
            try:
                for one, result in zip(asked, finished, strict=True):
                    own[one.number] = sample_of(one.problem, result)
                    rows.append([self._score(one.problem, result), *_facts(result)])
                    self.world.watch.progress()
            except Exception as e:
                error = e
            raise_together(error, self.world)
            gathered = [row for part in gather_json(rows, self.world) for row in part]
        self._reward_s = time.perf_counter() - started
        return Answers(
            rewards=[float(row[0]) for row in gathered],
            num_tokens=[int(row[1]) for row in gathered],
            is_truncated=[bool(row[2]) for row in gathered],
            longest=max((int(row[3]) for row in gathered), default=0),
            own=own,
        )

    def seconds(self) -> dict[str, float]:
        """Time of the last `answer`: generating, changing between trainer and engine, and the rewards."""
        generate = sum(record.seconds for record in self.cycle.records if record.name == "generate")
        return {
            "time_generate_s": generate,
            "time_switch_s": sum(record.seconds for record in self.cycle.records) - generate,
            "time_reward_s": self._reward_s,
        }

    def _prompt(self, one: Asked, temperature: float, record: bool) -> Prompt:
        ids = one.problem.ids
        return Prompt(
            rid=str(one.number),
            ids=ids,
            max_new_tokens=self.max_new_tokens,
            temperature=temperature,
            top_p=1.0,
            top_k=-1,
            min_new_tokens=0,
            stop_ids=[self.tokenizer.eos_id],
            seed=one.seed,
            logprobs=record,
            logprob_start=len(ids),
            routes=record,
            routes_start=0,
        )

    def _score(self, problem: Problem, result: Finished) -> float:
        if result.finish["type"] == "abort":
            raise EquipoiseError(
                f"the answer to the prompt {problem.prompt[-80:]!r} ({problem.where}) was ended: "
                f"{result.finish.get('message')}. Look at the loss and the gradient norm of the steps before"
            )
        written = result.output_ids
        if written and written[-1] == self.tokenizer.eos_id:
            written = written[:-1]
        return score(self.reward, self.reward_name, problem, self.tokenizer.decode(written))


def _facts(result: Finished) -> tuple[int, int, int]:
    """Tokens of the answer, whether it was cut, tokens with the prompt."""
    count = len(result.output_ids)
    return count, int(result.finish["type"] == "length"), result.prompt_tokens + count


def sample_of(problem: Problem, result: Finished) -> Sample:
    """What was recorded of an answer, for training."""
    routes = None
    if result.routes is not None:
        assert result.routes_dtype is not None
        flat = np.frombuffer(base64.b64decode(result.routes), np.dtype(result.routes_dtype))
        routes = flat.reshape(result.routes_shape)
    logprobs = result.output_logprobs or None
    return Sample([*problem.ids, *result.output_ids], len(problem.ids), logprobs, routes)
