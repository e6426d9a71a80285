"""One recipe, one text and one finished run, shared by the tests of the command."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.command import train

RECIPE = """
# A model of a few thousand parameters. The learning rate is constant, so that runs of any length agree, and eps
# is large, so that Adam does not make a step of full size of a gradient that is a rounding error.
[model]
hidden_size = 16
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
moe_intermediate_size = 12
num_experts = 6
num_experts_per_tok = 2
scoring_func = "sigmoid"
selection_bias = true
initializer_range = 0.1
router_aux_loss_coef = 0.01
router_aux_loss_scope = "global_batch"
[data]
source = "./text"
[train]
steps = 30
global_batch_size = 4
sequence_length = 24
eval_sequences = 6
[optimizer]
lr = 3e-2
eps = 1e-2
warmup_steps = 0
min_lr_ratio = 1.0
[metrics]
peak_flops = 1e12
"""
WORDS = ("the", "rank", "sends", "every", "token", "to", "an", "expert", "which", "sends", "it", "back", "weighted")


@dataclass(frozen=True)
class Base:
    """A folder with `recipe.toml` and texts; `run` in it is a finished run of 30 steps on 2 ranks with EP 2."""

    folder: Path
    run: Path
    output: str


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `recipe.toml` and texts."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "text").mkdir()
    generator = random.Random(0)
    texts = [" ".join(generator.choices(WORDS, k=60)) for _ in range(40)]
    for i, text in enumerate(texts[:20]):
        (folder / "text" / f"{i:02}.txt").write_text(text)
    lines = [json.dumps({"text": text[: 20 + i], "number": i}) for i, text in enumerate(texts[20:])]
    (folder / "few.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def base(workplace: Path) -> Base:
    folder = workplace
    settings = ["--parallel.ep-size", "2", "--train.eval-every", "5", "--checkpoint.every", "10"]
    output = train(folder, "base", *settings, "--checkpoint.keep-last", "0", "--metrics.tensorboard", nproc=2)
    return Base(folder, folder / "base", output)
