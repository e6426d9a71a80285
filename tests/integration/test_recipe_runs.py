"""The recipes for pretraining, continued pretraining and fine-tuning, each run at toy size on two ranks."""

import json
import math
import os
import random
from pathlib import Path

import pytest
import torch

from distributed.harness import run_ranks
from equipoise.train.config import TrainConfig
from equipoise.train.load import load_config
from equipoise.train.run import run_training
from integration.command import read_metrics
from unit.test_data_chat import save_tokenizer

transformers = pytest.importorskip("transformers")

MODEL = (
    "--model.vocab_size 320 --model.hidden_size 32 --model.num_hidden_layers 2 --model.num_attention_heads 2 "
    "--model.num_key_value_heads 1 --model.head_dim 16 --model.moe_intermediate_size 24 --model.num_experts 8 "
    "--model.num_experts_per_tok 2"
)
TOY = (
    "--parallel.ep_size 2 --train.steps 6 --train.global_batch_size 4 --train.micro_batch_size 1 "
    "--train.sequence_length 96 --train.eval_every 0 --train.eval_sequences 2 --train.precision float32 "
    "--optimizer.lr 1e-2 --optimizer.warmup_steps 1"
)
RECIPES = {
    "moe-100m": f"{MODEL} --data.source corpus",
    "continue": "--model.load_from model",
    "sft": "--model.load_from model",
}


def train_toy(name: str, folder: Path) -> str:
    os.chdir(folder)
    config = load_config(TrainConfig, name, f"{TOY} {RECIPES[name]}".split())
    run_training(config, folder / name, argv=["equipoise", "train", name], resume=False)
    return config.data.tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a corpus and conversations of a few words."""
    folder, generator = tmp_path_factory.mktemp("recipes"), random.Random(0)
    say = lambda: " ".join(generator.choices(["the", "rank", "sends", "a", "token"], k=7))  # noqa: E731
    (folder / "corpus").mkdir()
    for number in range(20):
        (folder / "corpus" / f"{number:02}.txt").write_text(" ".join(say() for _ in range(5)))
    talks = [[{"role": "user", "content": say()}, {"role": "assistant", "content": "token"}] for _ in range(40)]
    talks.append([{"role": "user", "content": "long " * 90}, {"role": "assistant", "content": "left out"}])
    (folder / "chat.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 8}
    config = transformers.Qwen3MoeConfig(**sizes, num_experts_per_tok=2, tie_word_embeddings=False)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_it_trains(folder: Path, name: str) -> None:
    tokenizers = run_ranks(train_toy, 2, name, folder, deadline_s=120)
    assert tokenizers == ["bytes" if name == "moe-100m" else "model"] * 2, "the model's own, if it has one"
    records = read_metrics(folder / name)
    assert (folder / name / "hf" / "tokenizer.json").is_file() == (name != "moe-100m")
    losses = [record["loss"] for record in records]
    assert len(losses) == 6
    assert losses[0] == pytest.approx(math.log(320), rel=0.1), "new weights"
    assert losses[-1] < losses[0] - 0.5
    if name == "sft":
        # The answer and its end are a small part of a conversation: only they have a loss.
        assert all(0 < record["tokens"] / (4 * 96) < 0.3 for record in records)
