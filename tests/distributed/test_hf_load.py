"""Weights of a Hugging Face folder in a sharded model: the right values on every rank, and errors on all together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distributed.harness import run_ranks
from distributed.parity import whole
from equipoise.accelerator import CPUAccelerator
from equipoise.checkpoint.hf import load, open_source
from equipoise.checkpoint.hf.load import load_weights
from equipoise.distributed.mesh import Meshes, ParallelConfig, build_meshes, derive_axes
from equipoise.distributed.world import World, join_world
from equipoise.errors import CheckpointError, RankFailure
from equipoise.models.model import IGNORED_LABEL
from equipoise.models.parallelize import build_parallel_model

VOCAB = 97
LACKING = "model.layers.2.mlp.experts.5.down_proj.weight"


def make_folders(path: Path) -> None:
    """Folders, one of them broken, and what transformers computes with them. Ranks have no need of transformers."""
    from unit.hf_toys import deepseek_model, hf_model

    models = {
        "qwen3_moe": hf_model(num_experts=6, tie_word_embeddings=True),
        "deepseek_v3": deepseek_model(num_hidden_layers=2),
    }
    for name, model in models.items():
        model.save_pretrained(path / name, max_shard_size="100KB")
        ids = torch.randint(0, VOCAB, (4, 13), generator=torch.Generator().manual_seed(4))
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
        torch.save({"ids": ids, "logits": output.logits.detach(), "gradients": gradients}, path / f"{name}.pt")
    models["qwen3_moe"].save_pretrained(path / "broken")
    file = path / "broken" / "model.safetensors"
    tensors = load_file(file)
    del tensors[LACKING]
    save_file(tensors, file)


def compare(world: World, meshes: Meshes, path: Path, name: str) -> dict[str, float]:
    """Norm-relative differences above 1e-5 of logits and every gradient to those of transformers, on this rank."""
    source = open_source(path / name)
    config = source.config.model_copy(update={"router_aux_loss_coef": 0.0})
    source.close()
    model = build_parallel_model(config, meshes, world.device, 0, initialize=False)
    load_weights(model, config, path / name, world)
    want = torch.load(path / f"{name}.pt")
    share = want["ids"].shape[0] // world.size
    mine = slice(world.rank * share, (world.rank + 1) * share)
    ids = want["ids"][mine]
    logits = model(ids).logits
    found = {"logits": relative(logits.detach(), want["logits"][mine])}
    labels = torch.cat([ids[:, 1:], torch.full((share, 1), IGNORED_LABEL)], dim=1)
    (model(ids, labels).loss_sum / (want["ids"].shape[0] * (ids.shape[1] - 1))).backward()
    gradients = whole({n: p.grad for n, p in model.named_parameters()})
    found |= {n: relative(gradients[n], g) for n, g in want["gradients"].items() if n in gradients}
    assert gradients.keys() == want["gradients"].keys()
    return {n: d for n, d in found.items() if not d <= 1e-5}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def compare_all(path: Path, ep_size: int, replicate_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    load.BETWEEN_AGREEMENTS = 50_000  # several batches
    parallel = ParallelConfig(ep_size=ep_size, replicate_size=replicate_size)
    with join_world(CPUAccelerator(), timeout_s=40) as world:
        meshes = build_meshes(derive_axes(parallel, world.size, num_experts=6), world)
        for name in ("qwen3_moe", "deepseek_v3"):
            found[name] = compare(world, meshes, path, name)
        found["refused"] = refused(world, meshes, path)
    return found


def refused(world: World, meshes: Meshes, path: Path) -> tuple[str, bool]:
    """A folder that only this rank sees as broken: the error, and whether the parameters are as they were."""
    source = open_source(path / "qwen3_moe")
    config = source.config
    source.close()
    model = build_parallel_model(config, meshes, world.device, 0)
    before = whole(dict(model.named_parameters()))
    folder = path / ("broken" if world.rank == world.size - 1 else "qwen3_moe")
    try:
        load_weights(model, config, folder, world)
        error = ""
    except (CheckpointError, RankFailure) as raised:
        error = str(raised)
    after = whole(dict(model.named_parameters()))
    return error, all(torch.equal(after[n], before[n]) for n in before)


@pytest.mark.parametrize(
    ("world_size", "ep_size", "replicate_size"),
    [
        pytest.param(1, 1, 1, marks=pytest.mark.slow),
        (2, 2, 1),
        (2, 1, 1),
        pytest.param(4, 2, 1, marks=pytest.mark.slow),
        pytest.param(4, 1, 2, marks=pytest.mark.slow),
        pytest.param(4, 1, 1, marks=pytest.mark.slow),
    ],
    ids="ranks{}".format,
)
def test_logits_and_every_gradient_equal_transformers(
    world_size: int, ep_size: int, replicate_size: int, tmp_path: Path
) -> None:
    make_folders(tmp_path)
    for found in run_ranks(compare_all, world_size, tmp_path, ep_size, replicate_size, deadline_s=150):
        assert found["qwen3_moe"] == {}
        assert found["deepseek_v3"] == {}
        error, same = found["refused"]
        assert LACKING in error
        assert same
