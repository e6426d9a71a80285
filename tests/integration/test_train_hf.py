"""A run that starts from a Hugging Face folder and leaves one."""

import json
from pathlib import Path

import pytest
import torch

from integration.command import stored, train
from integration.conftest import WORDS
from unit.hf_toys import deepseek_model, tensors_of

RECIPE = """
[model]
load_from = "./hf"
router_aux_loss_scope = "global_batch"
[data]
source = "./text"
[train]
steps = 1
global_batch_size = 2
sequence_length = 16
[optimizer]
lr = 1e-6
warmup_steps = 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, a text, and a DeepSeek-V3 in BF16 to start from."""
    path = tmp_path_factory.mktemp("train-hf")
    (path / "recipe.toml").write_text(RECIPE)
    (path / "text").mkdir()
    (path / "text" / "a.txt").write_text(" ".join(WORDS * 20))
    deepseek_model(vocab_size=272).to(torch.bfloat16).save_pretrained(path / "hf", max_shard_size="100KB")
    (path / "hf" / "merges.txt").write_text("a b")
    return path


def test_a_run_starts_from_a_hugging_face_folder_and_saves_one(folder: Path) -> None:
    output = train(folder, "run", "--parallel.ep-size", "2", "--save_hf", nproc=2)
    assert "loaded weights from hf" in output
    assert "saved the model for Hugging Face in run/hf" in output
    start, saved = tensors_of(folder / "hf"), tensors_of(folder / "run" / "hf")
    trained = stored(folder / "run", 1)
    assert saved.keys() == start.keys()
    for key, value in saved.items():
        if "e_score_correction_bias" in key:  # stays FP32 and moves by model.bias_update_speed
            assert value.dtype == torch.float32
            assert (value - start[key].float()).abs().max() <= 1.001e-3
            continue
        # One step of AdamW is at most the learning rate, 1e-6, and decay; BF16 has three digits.
        assert value.dtype == torch.bfloat16, key
        assert (value.float() - start[key].float()).abs().max() <= 1e-2 * start[key].abs().max(), key
    for expert in range(8):  # C37: each expert is itself, from two ranks with half of them each
        ours = trained["model.model.layers.2.mlp.experts.down_proj"][expert]
        assert torch.equal(saved[f"model.layers.2.mlp.experts.{expert}.down_proj.weight"], ours.bfloat16())
        assert (ours - start[f"model.layers.2.mlp.experts.{expert}.down_proj.weight"].float()).abs().max() <= 3e-6
    config = json.loads((folder / "run" / "hf" / "config.json").read_text())
    assert config == json.loads((folder / "hf" / "config.json").read_text())
    assert (folder / "run" / "hf" / "merges.txt").exists()
