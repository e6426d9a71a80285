"""What a model certainly needs, against the memory that is there: refused early, and never where it would fit."""

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
from equipoise.train.config import TrainConfig
from equipoise.train.memory import device_memory, refuse_too_large

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
    return TrainConfig.model_validate({"parallel": parallel, "model": model, "optimizer": {"offload": offload}})


def refuse(config: TrainConfig, memory: list[int], device: str = "cuda") -> None:
    axes = derive_axes(config.parallel, len(memory), config.model.num_experts)
    refuse_too_large(config, axes, memory, device)


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
    axes = derive_axes(chosen.parallel, 2, chosen.model.num_experts)
    for other, fits in ((needed - 1, True), (needed - 2, False)):
        monkeypatch.setattr(memory, "gather_json", lambda value, world: [value, other])  # noqa: B023
        if fits:
            memory.refuse_too_large_together(chosen, axes, world)  # type: ignore[arg-type]
        else:
            with pytest.raises(ConfigError, match="too large"):
                memory.refuse_too_large_together(chosen, axes, world)  # type: ignore[arg-type]


def test_swap_is_read_from_the_system(tmp_path) -> None:
    assert host_memory.swap(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nSwapTotal: 3 kB\nSwapFree: 1 kB\n")
    assert host_memory.swap(tmp_path) == 3072
