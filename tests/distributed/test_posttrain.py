"""Post-training over ranks: the same answers, rewards and updates however they are spread, interrupted or balanced."""

import math
import shutil
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import pytest
import torch

from distributed.harness import RanksFailed, run_ranks
from equipoise.accelerator import CPUAccelerator
from equipoise.balance import Balancer
from equipoise.distributed.world import join_world
from equipoise.observe.reader import open_trace
from equipoise.posttrain.generate import Answerer
from equipoise.posttrain.prompts import load_problems
from equipoise.posttrain.rewards import load_reward
from equipoise.posttrain.run import check_settings, run_posttraining
from equipoise.posttrain.trainer import PosttrainTrainer
from equipoise.train.config import TrainConfig
from equipoise.train.load import load_config, parse_config
from equipoise.train.stop import StopSignals
from integration.command import checkpoints, read_metrics, stored

RECIPE = """
[model]
vocab_size = 260
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
moe_intermediate_size = 16
num_experts = 4
num_experts_per_tok = 2
router_aux_loss_coef = 0.0
mlp_only_layers = [0]
initializer_range = 0.3
[posttrain]
reward = "{reward}"
num_generations = 4
max_new_tokens = 6
{posttrain}
[data]
eval_fraction = 0.2
[train]
steps = {steps}
global_batch_size = 16
micro_batch_size = 4
sequence_length = 12
eval_every = 2
[parallel]
ep_size = {ep_size}
timeout_s = 60
{balance}
[optimizer]
lr = 3e-3
[checkpoint]
every = {every}
"""
REWARDS = """
def ascii_share(prompt, answer, text):
    '''Dense, so that nearly every group has a signal.'''
    return sum(c.isascii() for c in text) / 6

def rarely(prompt, answer, text):
    '''Few groups have a signal, and the ranks differently many.'''
    return sum(c in "aeiouxyz" for c in text)

def never(prompt, answer, text):
    return 1

def sometimes_fails(prompt, answer, text):
    if prompt == "aa=":
        raise KeyError("no key for aa")
    return 0
"""
TRACE = "[trace]\nevery = 1\nmatrices_every = 1"
BALANCE = "[balance]\nnum_redundant_experts_per_rank = 2\ntolerance = 0.0"
EVERY_STEP = ("reward_mean", "reward_std", "answer_tokens_mean", "groups_with_signal", "truncated")
TIMES = ("time_", "tokens_per_second", "generated_tokens", "memory_", "balance_")


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    values = {"reward": "ascii_share", "posttrain": "", "steps": 3, "ep_size": 2, "balance": "", "every": 0} | changes
    values["reward"] = f"{folder / 'rewards_of_mine.py'}:{values['reward']}"
    return parse_config(TrainConfig, RECIPE.format(**values))


def on_rank(folder: Path, runs: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    """Plans made ahead in each run."""
    made: dict[str, list[int]] = {}
    plan_ahead = Balancer.plan_ahead
    for name, changes in runs.items():
        calls = made[name] = []

        def counted(self, keys, ids, calls=calls):
            calls.append(len(keys))
            plan_ahead(self, keys, ids)

        Balancer.plan_ahead = counted
        config = config_of(folder, **changes)
        check_settings(config, 2)
        run_posttraining(config, folder / name, ["test"], resume=True)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rewards_of_mine.py").write_text(REWARDS)
    return tmp_path


def run(folder: Path, ranks: int = 2, **runs: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    made = run_ranks(on_rank, ranks, folder, runs, deadline_s=150, env={"EQUIPOISE_ACCELERATOR": "cpu"})
    found = {name: read_metrics(folder / name) for name in runs}
    return found | {"planned ahead": [made[0]]}


def listed_fields(page: str) -> set[str]:
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    return {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}


def assert_same_training(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    assert len(got) == len(want) > 1
    for one, other in zip(got, want):
        for name in EVERY_STEP:
            assert one[name] == pytest.approx(other[name], abs=1e-12), name
        assert one["tokens"] == other["tokens"]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        assert one.get("entropy", 0) == pytest.approx(other.get("entropy", 0), rel=1e-4)


def test_layout_and_balancing_change_nothing(folder: Path) -> None:
    found = run(
        folder,
        ep2={"steps": 2},
        ep1={"ep_size": 1, "steps": 2},
        balanced={"balance": f"{BALANCE}\n{TRACE}", "steps": 2},
    )
    base = found["ep2"]
    for name in ("ep1", "balanced"):
        assert_same_training(found[name], base)
    for step in base:
        assert step["groups_with_signal"] > 0.5
        assert step["grad_norm"] > 0
        assert step["logprob_gap_max"] < 1e-4
        assert step["replay_agreement"] == 1.0
        assert step["importance_mean"] == pytest.approx(1, abs=1e-4)
        assert step["clipped"] == step["policy_kl"] == 0
        assert step["reward_mean"] < 1
        assert ("eval_reward" in step) == (step["step"] == 2)
        assert {"time_generate_s", "time_switch_s", "generated_tokens_per_second"} <= step.keys()
        assert "mfu" not in step
        assert listed_fields("posttraining.md") <= step.keys() | {
            "eval_reward",
            "eval_answer_tokens_mean",
            "eval_truncated",
        }
        assert step.keys() <= listed_fields("posttraining.md") | listed_fields("metrics.md") | {"layers"}
    assert len({step["reward_mean"] for step in base}) == len(base)  # other answers in each step
    (ahead,) = found["planned ahead"]
    assert (ahead["balanced"], ahead["ep2"]) == ([1] * 4, [])
    assert found["balanced"][0]["balance_copies"] > 0
    trace = open_trace(folder / "balanced")
    assert trace.steps() == [1, 2]
    for step in base:  # a prompt of 3 tokens and an answer but its last, to 2 experts: no generation, nothing twice
        rows = sum(int(load.load_PE.sum()) for load in trace.loads((step["step"], step["step"])))
        assert rows == 2 * (step["tokens"] + 2 * round(16 * step["answers_trained"]))


def without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if not k.startswith(TIMES) or k == "balance_copies"} for record in records]


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(folder: Path) -> None:
    """With several updates in a step, few groups with a signal, and balancing: rewards, metrics and every tensor."""
    changes = {"reward": "rarely", "posttrain": "updates_per_step = 2", "balance": BALANCE, "steps": 4, "every": 2}
    whole = run(folder, whole=changes)["whole"]
    assert any(record.get("policy_kl", 0) > 0 for record in whole)
    shutil.copytree(folder / "whole", folder / "again")
    shutil.rmtree(folder / "again" / "checkpoints" / "step-00000004")
    resumed = run(folder, again=changes)["again"]
    assert checkpoints(folder / "again") == [2, 4]
    assert [record["step"] for record in resumed] == [1, 2, 3, 4]
    assert without_times(resumed) == without_times(whole)
    assert any(0 < record["groups_with_signal"] < 1 for record in whole)
    got, want = stored(folder / "again", 4), stored(folder / "whole", 4)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def one_step(folder: Path) -> dict[str, Any]:
    """A whole step in one process, and the same from its answers alone: one answer, one token at a time."""
    config = config_of(folder, reward="rarely", ep_size=1, posttrain="")
    settings, found = config.posttrain, {}
    with join_world(CPUAccelerator(), timeout_s=40) as world, StopSignals() as stop:
        trainer = PosttrainTrainer(config, world, load_problems(config), load_reward(settings.reward), folder, stop)
        given, answer = [], Answerer.answer
        Answerer.answer = lambda *args, **options: given.append(answer(*args, **options)) or given[0]
        for _ in range(10):  # until there are groups with a signal and without
            given.clear()
            trainer.timer.start_step()
            result = trainer._learn(trainer.step + 1, 0.0)
            trainer.step += 1
            if 0 < result.further["groups_with_signal"] < 1:
                break
        model, (answers,) = trainer.model, given
        total, count, trained = torch.zeros(()), 0, 0
        for first in range(0, 16, 4):
            rewards = answers.rewards[first : first + 4]
            for number in range(first, first + 4):
                sample = answers.own[number]
                if max(rewards) == min(rewards):
                    continue
                advantage = (answers.rewards[number] - mean(rewards)) / pstdev(rewards)
                logits = model(torch.tensor([sample.ids])).logits[0]
                for place in range(sample.num_prompt, len(sample.ids)):
                    new = logits[place - 1].log_softmax(-1)[sample.ids[place]]
                    engine = sample.logprobs[place - sample.num_prompt]
                    total = total - min(math.exp(new.item() - engine), 2.0) * (new - new.item()).exp() * advantage
                    count += 1
                trained += 1
        (total / count).backward()
        squares = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
        found = {
            "loss": total.item() / count,
            "grad_norm": squares**0.5,
            "tokens": count,
            "answers_trained": trained / 16,
        }
        got = {"loss": result.loss, "grad_norm": result.grad_norm, "tokens": result.num_tokens} | result.further
    return {"found": {name: got[name] for name in found}, "wanted": found}


def test_a_whole_step_is_that_of_its_answers_taken_one_by_one(folder: Path) -> None:
    (result,) = run_ranks(one_step, 1, folder, deadline_s=100, env={"EQUIPOISE_ACCELERATOR": "cpu"})
    assert result["found"] == pytest.approx(result["wanted"], rel=1e-3, abs=1e-6)
    assert result["wanted"]["tokens"] > 3
    assert result["wanted"]["grad_norm"] > 0


@pytest.mark.slow
def test_one_process_live_routing_and_several_updates_give_the_same(folder: Path) -> None:
    base = run(folder, base={"steps": 2})["base"]
    later = {"posttrain": "updates_per_step = 2", "reward": "rarely", "steps": 4}
    found = run(folder, two=later | {"balance": BALANCE}, two_ep1=later | {"ep_size": 1})
    assert_same_training(found["two_ep1"], found["two"])
    live = run(folder, live={"posttrain": "replay_routes = false", "steps": 2})["live"]
    alone = run(folder, ranks=1, alone={"ep_size": 1, "steps": 2})["alone"]
    assert_same_training(live, base)
    assert_same_training(alone, base)
    assert all("replay_agreement" not in step for step in live)


def test_without_a_signal_nothing_changes(folder: Path) -> None:
    """Also at selection biases and moments; the steps are counted, and answers differ from step to step."""
    found = run(
        folder,
        never={"reward": "never", "steps": 2, "every": 1},
        cut={"posttrain": "mask_truncated = true", "steps": 1},
    )
    for record in found["never"]:
        assert (record["groups_with_signal"], record["answers_trained"], record["reward_std"]) == (0, 0, 0)
        assert record["loss"] == record["grad_norm"] == record["tokens"] == 0
        assert record["reward_mean"] == 1
        assert "entropy" not in record
    before, after = stored(folder / "never", 1), stored(folder / "never", 2)
    assert all(torch.equal(after[name], before[name]) for name in before if "step" not in name)
    (cut,) = found["cut"]
    assert cut["answers_trained"] == pytest.approx(cut["groups_with_signal"] * (1 - cut["truncated"]), abs=0.3)
    assert cut["answers_trained"] < cut["groups_with_signal"]


def test_a_reward_that_fails_ends_all_ranks_with_the_sample(folder: Path) -> None:
    with pytest.raises(RanksFailed) as raised:
        run(folder, failed={"reward": "sometimes_fails", "steps": 30})
    text = str(raised.value)
    assert "sometimes_fails raised KeyError: 'no key for aa'. It was given prompt 'aa='" in text
    assert text.count("exit code 1") == 2


DEMO = "--train.steps 80 --train.eval_every 0 --optimizer.min_lr_ratio 0.7"


def demo(folder: Path) -> None:
    config = load_config(TrainConfig, "posttrain-demo", DEMO.split())
    run_posttraining(config, folder / "demo", ["test"], resume=False)


@pytest.mark.slow
def test_the_demo_learns_from_random_weights(tmp_path: Path) -> None:
    """From one letter in a hundred to every second one, and some for prompts that it has never seen."""
    run_ranks(demo, 2, tmp_path, deadline_s=400, env={"EQUIPOISE_ACCELERATOR": "cpu"})
    rewards = [record["reward_mean"] for record in read_metrics(tmp_path / "demo")]
    assert max(rewards[:5]) < 0.03
    assert min(rewards[-5:]) > 0.5
    assert read_metrics(tmp_path / "demo")[-1]["eval_reward"] > 0.3
