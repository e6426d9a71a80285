"""Balancing in transformers' own expert parallelism, through its registry: losses and gradients are those of its
`all_to_all` and of one process, for every family tried; and the examples of the documents."""

import contextlib
import gc
import importlib.util
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed.harness import run_ranks
from distributed.parity import relative, whole
from equipoise.balance import BalanceConfig
from equipoise.errors import ConfigError
from equipoise.integrations import transformers as adapter

VOCAB, E = 64, 8
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "use_cache": False,
}
DEEPSEEK = {
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "n_routed_experts": E,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": E},
    "GptOss": {"intermediate_size": 24, "num_local_experts": E},  # biases, transposed and interleaved weights
    "Olmoe": {"intermediate_size": 24, "num_experts": E},
    "Mixtral": {"intermediate_size": 24, "num_local_experts": E},
    "Qwen2Moe": {
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": E,
        "shared_expert_intermediate_size": 40,
    },
    "Glm4Moe": {**DEEPSEEK, "routed_scaling_factor": 1.5},
    "DeepseekV3": {
        **DEEPSEEK,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "head_dim": 4,  # of the rotary part
        "num_key_value_heads": 4,
    },
}
LIMITS = dict.fromkeys(MODELS, 1e-5) | {"GptOss": 3e-5}  # the gradient of gpt-oss's router bias nearly cancels
CHECKPOINTED = ("Qwen3Moe", "GptOss")
CHECKPOINTING: dict[str, dict[str, Any] | None] = {
    "no checkpointing": None,
    "checkpointing": {},
    "reentrant checkpointing": {"use_reentrant": True},
}
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = "".join((DOCS / page).read_text() for page in ("integrations.md", "finetuning.md"))
EXAMPLE = re.compile(r"^```python\n# (\w+\.py); run it with: torchrun --nproc-per-node (\d) \1\n(.*?)^```", re.M | re.S)


def missing() -> str:
    """Why a model cannot be loaded with expert parallelism here; empty if it can."""
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface  # noqa: F401
    except ImportError as error:
        return f"transformers has no registry of EP implementations: {error}"
    return (
        "" if importlib.util.find_spec("accelerate") else "transformers loads no model in parallel without accelerate"
    )


@pytest.fixture(scope="module")
def _needs_transformers() -> None:
    if reason := missing():
        pytest.skip(reason)


def save_with_a_hot_rank(name: str, folder: Path) -> Path:
    """A model whose router prefers the first experts, so that rank 0 is the busiest."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SIZES | MODELS[name]))
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.mul_(5)  # not so small that experts hardly matter
            if key.endswith(("gate.weight", "router.weight")):
                parameter[: E // 2] *= 4
    model.save_pretrained(folder / name)
    return folder / name


def batch(rank: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + microbatch)
    return torch.randint(0, VOCAB, (1, (33, 9)[microbatch] + rank), generator=generator)


def load(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    gc.collect()  # models before
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options
    ).train()


def alone(folder: Path) -> dict[str, torch.Tensor]:
    """This rank's losses, and the gradients of the mean loss of all ranks, in one process."""
    model, found = load(folder), {}
    for rank in range(dist.get_world_size()):
        for microbatch in range(2):
            ids = batch(rank, microbatch)
            loss = model(input_ids=ids, labels=ids).loss
            (loss / dist.get_world_size()).backward()
            if rank == dist.get_rank():
                found[f"loss {microbatch}"] = loss.detach()
    return found | {name: p.grad for name, p in model.named_parameters()}


def train(
    folder: Path, parallel: dict[str, int], implementation: str, checkpointing: dict[str, Any] | None
) -> dict[str, torch.Tensor]:
    """Losses and whole gradients of two forwards and then two backwards."""
    from transformers.distributed import DistributedConfig

    model = load(folder, distributed_config=DistributedConfig(**parallel, ep_implementation=implementation))
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    losses = []
    for microbatch in range(2):
        ids = batch(dist.get_rank(), microbatch)
        losses.append(model(input_ids=ids, labels=ids).loss)
    for loss in losses:
        loss.backward()
    found = {f"loss {microbatch}": loss.detach() for microbatch, loss in enumerate(losses)}
    found |= whole({name: p.grad for name, p in model.named_parameters()})
    if implementation == "equipoise":
        (balancer,) = adapter._balancers.values()  # one for all layers
        records = balancer.take_records()
        found["records"] = torch.tensor([len(records), sum(r.copies for r in records)])
    return found


def difference(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest of all tensors, and whose it is."""
    assert got.keys() == want.keys()
    return max((relative(got[name], want[name]), name) for name in want)


def compare(folders: list[Path], parallel: dict[str, int], refused: dict[str, int] | None = None) -> dict[str, Any]:
    """What differs from transformers' own dispatch and from one process, and how much was balanced, by model and kind
    of checkpointing."""
    dist.init_process_group("gloo")
    adapter.register(BalanceConfig(tolerance=0.0))
    results: dict[str, Any] = {}
    for folder in folders:
        want, single = train(folder, parallel, "all_to_all", None), alone(folder)
        for kind, checkpointing in CHECKPOINTING.items():
            if checkpointing is not None and folder.name not in CHECKPOINTED:
                continue
            got = train(folder, parallel, "equipoise", checkpointing)
            forwards, copies = got.pop("records").tolist()
            results[f"{folder.name}, {kind}"] = {
                "forwards": forwards,
                "copies": copies,
                "from off": difference(got, want),
                "from one process": difference(got, single),
                "off from one process": difference(want, single),
            }
    if refused:
        try:
            train(folders[0], refused, "equipoise", None)
        except ConfigError as error:
            results["refused"] = str(error)
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def two(_needs_transformers: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folders = [save_with_a_hot_rank(name, tmp_path_factory.mktemp("models")) for name in MODELS]
    return run_ranks(compare, 2, folders, {"ep_size": 2, "fsdp_size": 2}, {"ep_size": 2, "tp_size": 2}, deadline_s=280)


def check(found: dict[str, Any], limit: float) -> None:
    assert max(found[which][0] for which in ("from off", "from one process", "off from one process")) <= limit, found
    assert found["copies"] > 0
    assert found["forwards"] == 2 * 2, "two MoE layers and two microbatches: a recompute is no forward of its own"


@pytest.mark.parametrize("name", MODELS)
def test_a_family_trains_as_without_balancing_and_as_in_one_process(two: list[dict[str, Any]], name: str) -> None:
    for rank in two:
        check(rank[f"{name}, no checkpointing"], LIMITS[name])


@pytest.mark.parametrize("checkpointing", [kind for kind, options in CHECKPOINTING.items() if options is not None])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_gradient_checkpointing_changes_nothing(two: list[dict[str, Any]], name: str, checkpointing: str) -> None:
    for rank in two:
        check(rank[f"{name}, {checkpointing}"], LIMITS[name])


def test_tensor_parallelism_is_refused(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert "needs tp_size 1" in rank["refused"]
        assert "Qwen3MoeExperts" in rank["refused"]


@pytest.mark.slow
@pytest.mark.usefixtures("_needs_transformers")
def test_experts_that_fsdp_gathers(tmp_path: Path) -> None:
    folder = save_with_a_hot_rank("Qwen3Moe", tmp_path)
    for rank in run_ranks(compare, 4, [folder], {"ep_size": 2, "fsdp_size": 4}, deadline_s=280):
        for found in rank.values():
            check(found, LIMITS["Qwen3Moe"])


def run_example(source: str, folder: Path) -> str:
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, "example", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def example(name: str, folder: Path) -> list[str]:
    """What each rank printed."""
    ((num_ranks, source),) = [(n, source) for found, n, source in EXAMPLE.findall(PAGES) if found == name]
    return run_ranks(run_example, int(num_ranks), source, folder, deadline_s=280)


def test_the_example_of_a_layer_runs(tmp_path: Path) -> None:
    assert all(len(eval(printed)) == 1 for printed in example("layer.py", tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("_needs_transformers")
def test_the_example_with_transformers_runs(tmp_path: Path) -> None:
    assert all(len(printed.splitlines()) == 2 for printed in example("finetune.py", tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("_needs_transformers")
def test_the_example_with_the_trainer_runs(tmp_path: Path) -> None:
    first, *others = example("trainer.py", tmp_path)
    assert first.count("grad_norm") == 2
    assert all("grad_norm" not in printed for printed in others), "one rank reports"
