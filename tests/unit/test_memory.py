"""What a model certainly needs, against the memory that is there: refused early, and never where it would fit."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from equipoise.accelerator import CPUAccelerator, host_memory
from equipoise.checkpoint.tensors import model_tensors
from equipoise.distributed.mesh import derive_axes
from equipoise.errors import ConfigError
from equipoise.models.config import OF_WEIGHTS, ModelConfig
from equipoise.models.model import MoEForCausalLM
from equipoise.train import memory
from equipoise.train.config import RunPlan, TrainConfig
from equipoise.train.memory import device_memory, host_share, kept_of_microbatch, refuse_too_large
from equipoise.train.resolved import save_resolved
from integration.command import clean_environment

PEAK = """
import resource
from equipoise.cli import main
main(standalone_mode=False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 32,
    "head_dim": 32,
    "scoring_func": "sigmoid",
    "selection_bias": True,
}
MODELS = [
    ModelConfig(),
    ModelConfig(tie_word_embeddings=True, n_shared_experts=2, num_hidden_layers=5, mlp_only_layers=(0, 3)),
    ModelConfig(decoder_sparse_step=2, num_hidden_layers=5, mlp_only_layers=(1, 2, 1), num_nextn_predict_layers=2),
    ModelConfig(decoder_sparse_step=3, num_hidden_layers=6, num_nextn_predict_layers=1),
    ModelConfig(num_hidden_layers=2, mlp_only_layers=(0, 1), num_nextn_predict_layers=1),
    ModelConfig(**LATENT, num_nextn_predict_layers=1),
    ModelConfig(**{**LATENT, "q_lora_rank": None}),
]


def shapes(model: ModelConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in model_tensors(MoEForCausalLM(model)).items()}


@pytest.mark.parametrize("model", MODELS, ids=range(len(MODELS)))
def test_parameters_and_layers_are_those_of_the_built_model(model: ModelConfig) -> None:
    assert model.matrix_parameters == sum(shape.numel() for shape in shapes(model).values() if len(shape) > 1)
    assert model.num_moe_layers == len(model.moe_layers)


def test_the_settings_of_the_weights_are_those_that_change_a_tensor() -> None:
    grouped = ModelConfig(num_hidden_layers=4, mlp_only_layers=(0,), num_nextn_predict_layers=1)
    latent = ModelConfig(**LATENT, mlp_only_layers=(0,))
    changed = set()
    for model in (grouped, latent):
        before = shapes(model)
        for name, value in model:
            if isinstance(value, bool):
                another: object = not value
            elif name in ("hidden_act", "scoring_func", "rope_scaling", "router_aux_loss_scope", "load_from"):
                continue
            elif name == "mlp_only_layers":
                another = (1,)
            elif name == "rope_theta" or isinstance(value, float):
                another = value * 2
            else:
                another = 2 * (value or 1)
            if shapes(model.model_copy(update={name: another})) != before:
                changed.add(name)
    assert changed == OF_WEIGHTS


def config(ep: int = 1, replicate: int = 1, offload: bool = False, **model: int) -> TrainConfig:
    parallel = {"ep_size": ep, "replicate_size": replicate}
    one_token = {"sequence_length": 1}  # so that gradients exceed what is kept of a microbatch
    return TrainConfig.model_validate(
        {"parallel": parallel, "model": model, "optimizer": {"offload": offload}, "train": one_token}
    )


def refuse(
    config: TrainConfig, memory: list[int], device: str = "cuda", micro: int = 1, steps: int = 1, host: int = 0
) -> None:
    axes = derive_axes(config.parallel, len(memory), config.model.num_experts)
    refuse_too_large(config, RunPlan(axes, micro, steps), memory, device, [host] * len(memory))


@pytest.mark.parametrize(
    ("ranks", "chosen", "device", "bytes_each"),
    [
        (1, config(), "cuda", 16),
        (1, config(offload=True), "cuda", 8),
        (1, config(offload=True), "cpu", 16),  # has no effect there
        (4, config(ep=2), "cuda", 4),
        (4, config(ep=2, replicate=2), "cuda", 8),
        (4, config(replicate=4), "cuda", 16),
    ],
    ids=str,
)
def test_the_bound_is_what_the_trainer_allocates(
    ranks: int, chosen: TrainConfig, device: str, bytes_each: float
) -> None:
    needed = round(chosen.model.matrix_parameters * bytes_each)
    refuse(chosen, [needed] * ranks, device)
    with pytest.raises(ConfigError, match="too large for the memory"):
        refuse(chosen, [needed - 1] * ranks, device)
    refuse(chosen, [0] + [1] * (ranks - 1), device)  # a platform that does not tell
    refuse(chosen, [needed - 1] * (ranks - 1) + [needed + ranks], device)  # parts of ranks may be uneven


@pytest.mark.parametrize(
    ("settings", "device", "itemsize"),
    [
        ({}, "cuda", 2),
        ({}, "cpu", 4),
        ({"precision": "float32"}, "cuda", 4),
        ({"precision": "bfloat16", "recompute": "full"}, "cpu", 2),
    ],
    ids=str,
)
def test_every_layers_input_and_the_logits_of_a_microbatch_count(
    settings: dict[str, str], device: str, itemsize: int
) -> None:
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "vocab_size": 1000, "num_nextn_predict_layers": 1}
    chosen = TrainConfig.model_validate({"model": sizes, "train": {"sequence_length": 128, **settings}})
    kept = 40 * 128 * (3 * 64 + 1000) * itemsize
    assert kept_of_microbatch(chosen, 40, device) == kept
    gradients = chosen.model.matrix_parameters * 4
    assert kept > gradients, "make the microbatch larger"
    for accumulation, needed in ((1, 3 * gradients + kept), (2, 4 * gradients + kept)):
        refuse(chosen, [needed], device, 40, accumulation)
        with pytest.raises(ConfigError, match="too large for the memory") as caught:
            refuse(chosen, [needed - 1], device, 40, accumulation)
        assert "layers and loss keep of a microbatch of 5,120 tokens, and a rank has" in str(caught.value)
        assert "Choose a smaller train.micro_batch_size or train.sequence_length, or a smaller model" in str(
            caught.value
        )


def test_a_long_vocabulary_is_held_in_parts() -> None:
    chosen = TrainConfig.model_validate({"model": {"vocab_size": 1 << 20, "hidden_size": 64, "num_hidden_layers": 1}})
    tokens = 8 * chosen.train.sequence_length
    assert tokens * (1 << 20) > 1 << 26
    assert kept_of_microbatch(chosen, 8, "cpu") <= (tokens * 64 + (1 << 26)) * 4


@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "most"), [("full", 1.25), ("selective", 20.0), ("none", 20.0)])
def test_no_run_keeps_less_of_a_microbatch(recompute: str, most: float, tmp_path: Path) -> None:
    """Peaks of whole runs that differ in the number of layers only, so that all else that a process holds cancels out.
    With full recompute they keep little more, where the C library gives freed memory back at once."""
    model = {"hidden_size": 256, "vocab_size": 64, "num_attention_heads": 1, "head_dim": 32, "num_key_value_heads": 1}
    model |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    loop = {"steps": 1, "sequence_length": 64, "global_batch_size": 128, "recompute": recompute, "eval_every": 0}
    peaks, kept = [], []
    for layers in (2, 14):
        chosen = TrainConfig.model_validate(
            {
                "model": model | {"num_hidden_layers": layers},
                "data": {"source": "random", "eval_fraction": 0.0},
                "train": loop,
            }
        )
        save_resolved(chosen, tmp_path, [])
        program = [sys.executable, "-c", PEAK, "train", "config.toml", "--out", f"{layers}"]
        environment = clean_environment() | {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
        done = subprocess.run(program, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.splitlines()[-1]))
        kept.append(kept_of_microbatch(chosen, 128, "cpu"))
    assert kept[1] - kept[0] == 12 * 128 * 64 * 256 * 4
    assert 1.0 < (peaks[1] - peaks[0]) / (kept[1] - kept[0]) < most


def test_moments_on_the_host_count_there() -> None:
    chosen = config(ep=2, offload=True)
    parameters = chosen.model.matrix_parameters
    memory = [10 * parameters] * 2
    refuse(chosen, memory, host=4 * parameters)
    refuse(chosen, memory, host=0)  # a platform that does not tell
    refuse(chosen, memory, "cpu", host=1)  # where it has no effect
    with pytest.raises(ConfigError) as caught:
        refuse(chosen, memory, host=4 * parameters - 1)
    assert str(caught.value).startswith(
        "the optimizer's state is too large for the hosts' memory: with optimizer.offload it needs about "
    )
    assert "parameters of 8 bytes, over 2 ranks), and there are" in str(caught.value)
    assert host_share(4) == host_memory.available_and_total()[1] // 4


def test_the_message_says_what_is_needed_and_what_to_change() -> None:
    large = config(replicate=2, hidden_size=1_000_000, num_experts=8)
    with pytest.raises(ConfigError) as caught:
        refuse(large, [80 * 10**9] * 4)
    assert str(caught.value) == (
        "the model is too large for the memory: it needs about 226 GB on each rank for parameters, gradients and "
        "optimizer (28.2 billion parameters of 16 bytes, over 2 ranks), and a rank has 80.0 GB (cuda). Choose a "
        "smaller model (model.num_hidden_layers, model.hidden_size, model.num_experts, ...), or at least 12 ranks, or "
        "parallel.replicate_size 1, which spreads one copy over all ranks, or optimizer.offload, which moves 8 of the "
        "bytes to the host"
    )


@pytest.mark.parametrize("size", [10**9, 10**18, 10**400])
@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size", "num_experts"])
def test_no_size_is_too_large_to_be_counted(name: str, size: int) -> None:
    """A model of so many layers cannot be built, even without memory; one of such widths overflows torch's sizes."""
    with pytest.raises(ConfigError, match="too large for the memory"):
        refuse(config(**{name: size}), [10**11] * 2)


def test_ranks_on_a_cpu_share_the_host_with_its_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = CPUAccelerator()
    total = cpu.memory().total
    monkeypatch.setattr(host_memory, "swap", lambda: 7000)
    assert device_memory(cpu, 1) == total + 7000
    assert device_memory(cpu, 4) == (total + 7000) // 4
    gpu = SimpleNamespace(device_type="cuda", memory=lambda: SimpleNamespace(total=80))
    assert device_memory(gpu, 4) == 80  # each has its own


def test_all_ranks_refuse_when_the_memory_of_all_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = config()
    needed = chosen.model.matrix_parameters * 8
    gpu = SimpleNamespace(device_type="cuda", name="cuda", memory=lambda: SimpleNamespace(total=needed + 1))
    world = SimpleNamespace(accelerator=gpu, local_size=2)
    plan = RunPlan(derive_axes(chosen.parallel, 2, chosen.model.num_experts), 1, 1)
    for other, fits in ((needed - 1, True), (needed - 2, False)):
        monkeypatch.setattr(memory, "gather_json", lambda value, world: [value, (other, 0)])  # noqa: B023
        if fits:
            memory.refuse_too_large_together(chosen, plan, world)  # type: ignore[arg-type]
        else:
            with pytest.raises(ConfigError, match="too large"):
                memory.refuse_too_large_together(chosen, plan, world)  # type: ignore[arg-type]


def test_swap_is_read_from_the_system(tmp_path) -> None:
    assert host_memory.swap(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nSwapTotal: 3 kB\nSwapFree: 1 kB\n")
    assert host_memory.swap(tmp_path) == 3072
