"""FP8 with factors of blocks: against a plain loop over the blocks, on sizes that do not divide."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from equipoise.checkpoint.hf import export, open_source
from equipoise.checkpoint.hf.fp8 import dequantize, quantize, scale_shape
from equipoise.errors import CheckpointError
from unit.hf_toys import deepseek_model, hf_model, tensors_of

SHAPES = [(1, 1), (128, 128), (127, 129), (300, 5), (2, 257), (384, 256)]


def matrix(shape: tuple[int, int]) -> torch.Tensor:
    """Rows and columns of very different size, so that a factor of a wrong block shows."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    rows, columns = torch.arange(shape[0])[:, None] // 128, torch.arange(shape[1]) // 128
    return torch.randn(shape, generator=generator) * 10.0 ** (rows - 2 * columns)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_block_has_its_own_factor(shape: tuple[int, int]) -> None:
    values = matrix(shape)
    stored, scale = quantize(values)
    assert (stored.dtype, tuple(scale.shape)) == (torch.float8_e4m3fn, scale_shape(shape))
    for i in range(0, shape[0], 128):
        for j in range(0, shape[1], 128):
            block, factor = values[i : i + 128, j : j + 128], scale[i // 128, j // 128]
            assert factor == block.abs().max() / 448
            want = (block / factor).to(torch.float8_e4m3fn)
            assert torch.equal(stored[i : i + 128, j : j + 128].float(), want.float())
            back = dequantize(stored, scale)[i : i + 128, j : j + 128]
            assert torch.equal(back, want.float() * factor)
            assert (back - block).abs().max() <= block.abs().max() / 16  # half a step of three bits


@pytest.mark.parametrize("rows", [(0, 1), (100, 200), (127, 129), (128, 300), (299, 300)])
def test_any_rows_read_alone(rows: tuple[int, int]) -> None:
    stored, scale = quantize(matrix((300, 130)))
    first, last = rows
    part = dequantize(stored[first:last], scale[first // 128 : -(-last // 128)], first)
    assert torch.equal(part, dequantize(stored, scale)[first:last])


def test_zeros_stay_zeros() -> None:
    stored, scale = quantize(torch.zeros(130, 3))
    assert torch.equal(dequantize(stored, scale), torch.zeros(130, 3))
    assert torch.equal(scale, torch.ones(2, 1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: hf_model(hidden_size=160, moe_intermediate_size=136, num_hidden_layers=2),
        lambda: deepseek_model(hidden_size=160, kv_lora_rank=130, num_hidden_layers=2),
    ],
)
def test_a_folder_in_fp8_and_back(make, tmp_path: Path, monkeypatch) -> None:
    """What is FP8, what is not, and that reading it block by block gives the values of the whole."""
    make().save_pretrained(tmp_path / "hf")
    monkeypatch.setattr("equipoise.checkpoint.hf.write.ROWS_BYTES", 4096)  # many reads per matrix
    export(open_source(tmp_path / "hf"), tmp_path / "fp8", "hf", torch.float8_e4m3fn)
    original, stored = tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "fp8")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert config["dtype"] == "bfloat16"
    quantized = {key for key, value in stored.items() if value.dtype == torch.float8_e4m3fn}
    assert quantized
    for key, value in original.items():
        is_kept = any(word in key for word in ("norm", "mlp.gate.", "embed", "lm_head"))
        assert (key in quantized) == (not is_kept), key
        if key in quantized:
            want = quantize(value)
            assert torch.equal(stored[key].view(torch.uint8), want[0].view(torch.uint8)), key
            assert torch.equal(stored[key + "_scale_inv"], want[1]), key
        elif "e_score_correction_bias" in key:
            assert torch.equal(stored[key], value)
        else:
            assert torch.equal(stored[key], value.bfloat16()), key
    export(open_source(tmp_path / "fp8"), tmp_path / "back", "hf", torch.float32)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    for key, value in tensors_of(tmp_path / "back").items():
        if key in quantized:
            assert torch.equal(value, dequantize(*quantize(original[key]))), key
    export(open_source(tmp_path / "fp8"), tmp_path / "native", "native")  # BF16 by default
    natives = tensors_of(tmp_path / "native")
    assert not any(value.dtype == torch.float8_e4m3fn for value in natives.values())
    name = "model.layers.1.mlp.experts.down_proj"
    assert natives[name].dtype == torch.bfloat16


def test_factors_that_are_missing_or_of_the_wrong_shape(tmp_path: Path) -> None:
    hf_model().save_pretrained(tmp_path / "hf")
    export(open_source(tmp_path / "hf"), tmp_path / "fp8", "hf", torch.float8_e4m3fn)
    tensors, key = tensors_of(tmp_path / "fp8"), "model.layers.0.self_attn.k_proj.weight"
    file = tmp_path / "fp8" / "model.safetensors"
    save_file({k: t for k, t in tensors.items() if k != key + "_scale_inv"}, file)
    with pytest.raises(CheckpointError, match=f"'{key}' .* without '{key}_scale_inv'"):
        open_source(tmp_path / "fp8")
    save_file(tensors | {key + "_scale_inv": torch.ones(2, 1)}, file)
    with pytest.raises(CheckpointError, match=r"k_proj\.weight_scale_inv' .* has shape \[2, 1\]; expected \[1, 1\]"):
        open_source(tmp_path / "fp8")
