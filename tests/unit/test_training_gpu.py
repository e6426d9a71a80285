"""What a GPU does differently in training from a checkpoint: latent attention at DeepSeek-V3's head sizes, a folder's
weights on the device, moments in host memory with streams for both directions, saves through pinned memory."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equipoise.accelerator import get_accelerator
from equipoise.checkpoint.hf import HFMapping, export, hf_config, open_source, parse_dtype
from equipoise.checkpoint.hf.load import load_weights
from equipoise.checkpoint.hf.safetensors_file import SafetensorsWriter
from equipoise.checkpoint.hf.write import _write_json
from equipoise.checkpoint.tensors import model_tensors
from equipoise.checkpoint.training import CheckpointSaver, TrainingState, load_checkpoint
from equipoise.models.attention import build_attention, document_mask
from equipoise.models.config import ModelConfig
from equipoise.models.families import family_of_type
from equipoise.models.model import MoEForCausalLM
from equipoise.models.rotary import rotary_tables
from equipoise.train.offload import OffloadedAdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
DEEPSEEK = family_of_type("deepseek_v3").read_config(
    {
        "vocab_size": 97,
        "hidden_size": 256,
        "intermediate_size": 96,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "num_nextn_predict_layers": 0,
    }
)
CONFIG = ModelConfig(**DEEPSEEK)  # heads of 128 + 64 features, values of 128: as released
LENGTH = 300
ENDS = (7, 8, 200)  # of the documents of the first sequence; the second is one


def attention(dtype: torch.dtype, device: torch.device, packed: bool) -> dict[str, torch.Tensor]:
    """Output and all gradients, in FP64 on the CPU. The same weights and inputs everywhere, of BF16's precision."""
    torch.manual_seed(0)
    module = build_attention(CONFIG)
    for parameter in module.parameters():
        parameter.data = (parameter.data * (3 if parameter.dim() > 1 else 1)).bfloat16().float()
    x_BSD, weight_BSD = (torch.randn(2, LENGTH, 256).bfloat16().to(device, dtype) for _ in range(2))
    module.to(device, dtype)
    x_BSD.requires_grad_()
    documents = torch.zeros(2, LENGTH, dtype=torch.int64)
    for end in ENDS:
        documents[0, end:] += 1
    positions = torch.arange(LENGTH)[None].to(device)
    rotary = rotary_tables(positions, CONFIG.head_dim, CONFIG.rope_theta, dtype)
    out_BSD = module(x_BSD, rotary, document_mask(documents.to(device) if packed else None))
    (out_BSD * weight_BSD).sum().backward()
    found = {"output": out_BSD, "input's gradient": x_BSD.grad}
    found |= {name: parameter.grad for name, parameter in module.named_parameters()}
    return {name: tensor.detach().cpu().double() for name, tensor in found.items()}


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"])
def test_latent_attention(dtype: torch.dtype, limit: float, packed: bool) -> None:
    want, got = attention(torch.float64, torch.device("cpu"), packed), attention(dtype, DEVICE, packed)
    for name, value in want.items():
        difference = float((got[name] - value).norm() / value.norm())
        print(f"{dtype}, packed {packed}, {name}: {difference:.1e}")
        assert difference < limit, name


class OneRank:
    """What loading and saving ask of a world of one, without process groups."""

    rank, size, timeout_s = 0, 1, 60.0

    def __init__(self) -> None:
        self.accelerator = get_accelerator()

    def operation(self, name: str, deadline_s: float | None = None) -> Any:
        return contextlib.nullcontext()


def save_folder(model: MoEForCausalLM, folder: Path) -> None:
    mapping = HFMapping(CONFIG)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model_tensors(model).items():
        tensors |= {key: value.contiguous() for key, value in mapping.to_hf(name, tensor.detach())}
    folder.mkdir()
    writer = SafetensorsWriter(folder / "model.safetensors", {k: (t.dtype, tuple(t.shape)) for k, t in tensors.items()})
    for key, tensor in tensors.items():
        writer.write_rows(key, 0, tensor)
    writer.close()
    _write_json(folder / "config.json", hf_config(mapping))


def test_weights_of_a_folder_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain ones bit by bit; in FP8 and INT4 those that a conversion on the CPU gives."""
    monkeypatch.setattr("equipoise.checkpoint.hf.load.raise_together", lambda error, world: _raise(error))
    torch.manual_seed(1)
    model = MoEForCausalLM(CONFIG)
    for tensor in model_tensors(model).values():
        nn.init.normal_(tensor.detach(), std=0.2)
    save_folder(model, tmp_path / "plain")
    for form in ("float8_e4m3", "int4"):
        export(open_source(tmp_path / "plain"), tmp_path / form, "hf", parse_dtype(form))
    for name in ("plain", "float8_e4m3", "int4"):
        loaded = MoEForCausalLM(CONFIG).to(DEVICE)
        load_weights(loaded, CONFIG, tmp_path / name, OneRank())  # type: ignore[arg-type]
        source = open_source(tmp_path / name)
        for key, tensor in model_tensors(loaded).items():
            want = source.read(key, (0,) * tensor.dim(), tuple(tensor.shape), torch.float32)
            assert tensor.device == DEVICE
            assert torch.equal(tensor.detach().cpu(), want), (name, key)
            if name == "plain":
                assert torch.equal(want, model_tensors(model)[key].detach()), key


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(515, 515, bias=i % 2 == 0) for i in range(6))).to(DEVICE)


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, device=DEVICE, generator=generator)


def build_optimizer(model: nn.Module, offloaded: bool) -> torch.optim.AdamW:
    groups = [{"params": list(model.parameters())}]
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}
    if offloaded:  # a bucket for each layer
        return OffloadedAdamW(groups, get_accelerator(), bucket_bytes=1 << 20, **options)
    return torch.optim.AdamW(groups, **options)


def test_offloaded_moments_give_the_same_bits() -> None:
    """With the host running ahead: nothing waits between the steps."""
    models = {offloaded: layers() for offloaded in (False, True)}
    optimizers = {offloaded: build_optimizer(model, offloaded) for offloaded, model in models.items()}
    for offloaded, model in models.items():
        for step in range(8):
            give_gradients(model, step)
            optimizers[offloaded].step()
    torch.cuda.synchronize()
    for plain, ours in zip(models[False].parameters(), models[True].parameters(), strict=True):
        assert torch.equal(plain, ours)
        for slot in ("exp_avg", "exp_avg_sq"):
            home = optimizers[True].state[ours][slot]
            assert home.device.type == "cpu"
            assert home.is_pinned()
            assert torch.equal(home, optimizers[False].state[plain][slot].cpu()), slot


def train(model: nn.Module, optimizer: torch.optim.AdamW, save: Any) -> None:
    """Eight steps; `save` is called after the first and the fifth, with no wait before or after."""
    for step in range(8):
        give_gradients(model, step)
        optimizer.step()
        if step % 4 == 0:
            save(step)


@pytest.mark.parametrize("offloaded", [False, True], ids=["on the device", "offloaded"])
def test_a_save_holds_the_state_of_its_moment(tmp_path: Path, offloaded: bool) -> None:
    """Steps are enqueued right before and behind the copies to pinned memory. The second save reuses the buffers."""
    model, world = layers(), OneRank()
    optimizer = build_optimizer(model, False)
    wanted: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def note(step: int) -> None:
        torch.cuda.synchronize()
        wanted[step] = [(p.detach().cpu(), optimizer.state[p]["exp_avg"].cpu()) for p in model.parameters()]

    train(model, optimizer, note)
    saved = layers()
    moments = build_optimizer(saved, offloaded)
    saver = CheckpointSaver(tmp_path, world, keep_last=2)  # type: ignore[arg-type]
    paths = {}

    def save(step: int) -> None:
        paths[step] = saver.save(TrainingState(saved, moments, step=step), False)

    train(saved, moments, save)
    saver.finish()
    buffers = [b for b in saver._staging._buffers.values() if b.dtype == torch.float32 and b.numel() > 1]
    assert sum(buffer.is_pinned() for buffer in buffers) == len(wanted[0]) * (1 if offloaded else 3)
    for step, path in paths.items():
        loaded = layers()
        other = build_optimizer(loaded, offloaded)
        load_checkpoint(path, TrainingState(loaded, other), world)  # type: ignore[arg-type]
        for got, (want, moment) in zip(loaded.parameters(), wanted[step], strict=True):
            assert torch.equal(got.detach().cpu(), want), step
            assert torch.equal(other.state[got]["exp_avg"].cpu(), moment), step
