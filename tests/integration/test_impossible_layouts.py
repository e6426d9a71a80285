"""Sizes that do not fit (cases.md C24): refused by the command before any process group or worker exists."""

from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist
from typer.testing import CliRunner

from equipoise import cli
from equipoise.train import run
from equipoise.train.config import TrainConfig
from equipoise.train.load import load_config


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, with a command that may start nothing."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was started")

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "cpu")
    monkeypatch.setattr(cli.launch, "launch", refuse)
    monkeypatch.setattr(run, "run_training", refuse)
    monkeypatch.setattr(dist, "init_process_group", refuse)
    monkeypatch.chdir(tmp_path)
    return tmp_path


IMPOSSIBLE = {
    "experts over ep, report": (3, "model.num_experts=256 parallel.ep_size=3", ["256", "ep_size 3", "[1]"]),
    "experts over ep, report 2": (6, "model.num_experts=128 parallel.ep_size=6", ["128", "ep_size 6", "[1, 2]"]),
    "experts over ep": (4, "model.num_experts=6 parallel.ep_size=4", ["6", "ep_size 4", "[1, 2]", "multiple of 4"]),
    "ranks over ep": (3, "parallel.ep_size=2", ["parallel.ep_size is 2", "3 ranks", "[1, 3]"]),
    "ep above the ranks": (1, "parallel.ep_size=2", ["parallel.ep_size is 2", "1 ranks", "[1]", "--nproc-per-node 2"]),
    "replicas": (6, "parallel.replicate_size=4", ["replicate_size is 4", "world size 6", "[1, 2, 3, 6]"]),
    "ep inside a replica": (
        8,
        "parallel.replicate_size=4 parallel.ep_size=4",
        ["ep_size is 4", "2 ranks", "[1, 2]"],
    ),
    "top-k above the experts": (
        1,
        "model.num_experts=4 model.num_experts_per_tok=5",
        ["num_experts_per_tok is 5", "4 experts", "1 to 4"],
    ),
    "groups": (1, "model.num_experts=8 model.n_group=3", ["n_group is 3", "num_experts 8", "[1, 2, 4, 8]"]),
    "key-value heads": (1, "model.num_key_value_heads=3", ["num_key_value_heads is 3", "4", "[1, 2, 4]"]),
    "batch over ranks": (3, "train.global_batch_size=16", ["global_batch_size is 16", "3 ranks", "such as 15"]),
    "microbatch": (2, "train.micro_batch_size=3", ["micro_batch_size is 3", "8 sequences", "[1, 2, 4, 8]"]),
    "sequence length": (
        1,
        "train.sequence_length=64 model.max_position_embeddings=32",
        ["sequence_length is 64", "max_position_embeddings 32"],
    ),
    "planner": (
        2,
        "parallel.ep_size=2 balance.planner=nope",
        ["balance.planner", "'nope'", "exact_load", "my_file.py:function"],
    ),
    "no profiled rank": (1, "profiler.ranks=[]", ["profiler.ranks", "of length >= 1"]),
    "local dispatcher": (2, "parallel.ep_size=2 parallel.dispatcher=local", ["'local'", "ep_size is 2", "all_to_all"]),
}


@pytest.mark.parametrize(("nproc", "settings", "words"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_an_impossible_combination_names_both_numbers_and_the_valid_values(
    folder: Path, nproc: int, settings: str, words: list[str]
) -> None:
    arguments = ["train", "--nproc-per-node", str(nproc), *(f"--{setting}" for setting in settings.split())]
    result = CliRunner().invoke(cli.main, arguments, prog_name="equipoise")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ")
    for word in words:
        assert word in result.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("experts", "ep", "inner"), [(512, 8, 6), (160, 8, 8), (6, 2, 2), (4, 2, 4)])
def test_uneven_shards_are_no_error(experts: int, ep: int, inner: int) -> None:
    """64 rows over 6, 20 over 8 with an empty shard, ...: that they train, test_training_cases.py shows."""
    settings = [f"--model.num-experts={experts}", f"--parallel.ep-size={ep}", "--model.num-experts-per-tok=2"]
    settings += [f"--train.global-batch-size={ep * inner}"]
    load_config(TrainConfig, None, settings).check_world(ep * inner)


@pytest.mark.parametrize(("world_size", "ep"), [(1, 1), (2, 2), (4, 2), (8, 8)])
def test_the_demo_fits_any_machine_with_one_setting(world_size: int, ep: int) -> None:
    """One device is enough (symptom 20 in SYMPTOMS.md); the preset itself is for two ranks."""
    load_config(TrainConfig, "demo", [f"--parallel.ep-size={ep}"]).check_world(world_size)
