"""INT4 with factors of groups: against compressed-tensors, whose format it is, and against loops over values."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from equipoise.checkpoint.hf import export, open_source, parse_dtype
from equipoise.checkpoint.hf.int4 import INT4Groups, declared_int4, dequantize, pack, quantize, unpack
from equipoise.checkpoint.hf.quantization import dtype_of
from equipoise.cli import main
from equipoise.errors import CheckpointError
from unit.hf_toys import deepseek_model, hf_model, tensors_of

KEY = "model.layers.1.mlp.experts.3.down_proj.weight"


def matrix(rows: int, columns: int) -> torch.Tensor:
    """Groups of very different size, so that a factor of a wrong group shows."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    sizes = 10.0 ** (torch.arange(rows)[:, None] % 3 - torch.arange(columns) // 8 % 4)
    return torch.randn(rows, columns, generator=generator) * sizes


@pytest.mark.parametrize("columns", [1, 7, 8, 9, 64])
def test_each_value_has_its_four_bits(columns: int) -> None:
    values = torch.randint(-8, 8, (5, columns), generator=torch.Generator().manual_seed(columns))
    words = pack(values)
    assert (words.dtype, tuple(words.shape)) == (torch.int32, (5, -(-columns // 8)))
    for row in range(5):
        for column in range(columns):
            word = int(words[row, column // 8]) & 0xFFFFFFFF
            assert (word >> 4 * (column % 8) & 15) - 8 == values[row, column]
    assert torch.equal(unpack(words, columns), values.to(torch.int8))


@pytest.mark.parametrize(("rows", "columns", "group"), [(1, 8, 8), (3, 64, 32), (130, 96, 32), (5, 256, 128)])
def test_each_group_has_its_own_factor(rows: int, columns: int, group: int) -> None:
    values = matrix(rows, columns)
    words, scale = quantize(values, group)
    assert (scale.dtype, tuple(scale.shape)) == (torch.bfloat16, (rows, columns // group))
    back = dequantize(words, scale, columns, group)
    stored = unpack(words, columns)
    for row in range(rows):
        for first in range(0, columns, group):
            part, factor = values[row, first : first + group], float(scale[row, first // group])
            assert factor == float((part.abs().max() / 7.5).bfloat16())
            for column in range(group):
                q = max(-8, min(7, round(float(part[column] / torch.tensor(factor)))))
                assert stored[row, first + column] == q
                assert back[row, first + column] == torch.tensor(factor) * q
            assert (
                back[row, first : first + group] - part
            ).abs().max() <= 0.54 * factor  # half a step, and the rounding of the factor at 7.5 of them


def test_zeros_stay_zeros() -> None:
    words, scale = quantize(torch.zeros(2, 16), 8)
    assert torch.equal(dequantize(words, scale, 16, 8), torch.zeros(2, 16))
    assert torch.equal(scale, torch.ones(2, 2, dtype=torch.bfloat16))


def scheme(group: int, symmetric: bool) -> Any:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = quantization.QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, **strategy)
    return quantization.QuantizationScheme(targets=["Linear"], weights=weights)


def by_the_reference(values: torch.Tensor, group: int, symmetric: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What compressed-tensors stores for a matrix and what it reads back."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    groups = values.unflatten(1, (-1, group or values.shape[1]))
    wanted = scheme(group, symmetric)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), wanted.weights)
    state = {"weight": values, "weight_scale": scale.bfloat16().float(), "weight_zero_point": zero}
    stored = PackedQuantizationCompressor.compress(state, wanted)
    return stored, PackedQuantizationCompressor.decompress(stored, wanted)["weight"]


@pytest.mark.parametrize(("rows", "columns", "group"), [(1, 8, 8), (13, 64, 32), (9, 96, 32), (5, 256, 128)])
def test_what_is_written_is_what_compressed_tensors_writes(rows: int, columns: int, group: int) -> None:
    values = matrix(rows, columns)
    stored, back = by_the_reference(values, group, True)
    words, scale = quantize(values, group)
    assert torch.equal(words, stored["weight_packed"])
    assert torch.equal(scale.float(), stored["weight_scale"])
    assert torch.equal(dequantize(words, scale, columns, group), back)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("rows", "columns", "group"), [(13, 64, 32), (16, 48, 16), (21, 20, 0), (3, 7, 0)])
def test_what_compressed_tensors_writes_is_read(rows: int, columns: int, group: int, symmetric: bool) -> None:
    """Also with zeros, with one factor per row, and with columns that fill no word; any rows alone."""
    stored, back = by_the_reference(matrix(rows, columns), group, symmetric)
    form = INT4Groups(group, symmetric)
    tensors = {"x." + name: value for name, value in stored.items()}
    assert {k: tuple(v.shape) for k, v in tensors.items()} == {
        k: shape for k, (_, shape) in form.header("x.weight", (rows, columns)).items()
    }

    def read(key: str, first: int, count: int) -> torch.Tensor:
        assert first + count <= tensors[key].shape[0]
        return tensors[key][first : first + count]

    for start, stop in [(0, rows), (0, 1), (rows - 1, rows), (1, rows - 1)]:
        got = form.decode("x.weight", (rows, columns), slice(start, stop), read)
        assert torch.equal(got, back[start:stop].float()), (start, stop)
    assert form.contradiction("x.weight", (rows, columns), read) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: hf_model(hidden_size=64, moe_intermediate_size=96, num_hidden_layers=2),
        lambda: deepseek_model(hidden_size=64, moe_intermediate_size=96, num_hidden_layers=2),
    ],
    ids=["qwen3_moe", "deepseek_v3"],
)
def test_a_folder_in_int4_and_back(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routed experts alone are INT4; every reader of the format finds them by what `config.json` says."""
    make().save_pretrained(tmp_path / "hf")
    monkeypatch.setattr("equipoise.checkpoint.hf.write.ROWS_BYTES", 4096)  # many reads per matrix
    export(open_source(tmp_path / "hf"), tmp_path / "int4", "hf", parse_dtype("int4"), shard_bytes=60_000)
    original, stored = tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "int4")
    config = json.loads((tmp_path / "int4" / "config.json").read_text())
    declared = config["quantization_config"]
    assert config["dtype"] == "bfloat16"
    assert declared_int4(declared) == INT4Groups(32, True)
    experts = {key for key in original if ".mlp.experts." in key}
    assert experts
    for key, value in original.items():
        if key in experts:
            words, scale = quantize(value, 32)
            assert torch.equal(stored.pop(key + "_packed"), words), key
            assert torch.equal(stored.pop(key + "_scale"), scale), key
            assert stored.pop(key + "_shape").tolist() == list(value.shape)
        elif "e_score_correction_bias" in key:
            assert torch.equal(stored.pop(key), value)
        else:
            assert torch.equal(stored.pop(key), value.bfloat16()), key
            is_matrix = key.endswith(".weight") and value.dim() == 2
            assert (key.removesuffix(".weight") in declared["ignore"]) == is_matrix, key
    assert not stored
    export(open_source(tmp_path / "int4"), tmp_path / "back", "hf", torch.float32)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    for key, value in tensors_of(tmp_path / "back").items():
        if key in experts:
            want = dequantize(*quantize(original[key], 32), value.shape[1], 32)
            assert torch.equal(value, want), key
    export(open_source(tmp_path / "int4"), tmp_path / "native", "native")  # BF16 by default
    assert tensors_of(tmp_path / "native")["model.layers.1.mlp.experts.down_proj"].dtype == torch.bfloat16
    assert dtype_of(config) == torch.bfloat16


def test_compressed_tensors_reads_a_written_folder(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    hf_model(hidden_size=64, moe_intermediate_size=64).save_pretrained(tmp_path / "hf")
    export(open_source(tmp_path / "hf"), tmp_path / "int4", "hf", parse_dtype("int4", 16))
    declared = json.loads((tmp_path / "int4" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(declared)
    (wanted,) = config.config_groups.values()
    stored, source = tensors_of(tmp_path / "int4"), open_source(tmp_path / "int4")
    prefix = KEY.removesuffix("weight")
    parts = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
    back = PackedQuantizationCompressor.decompress(parts, wanted)["weight"]
    ours = source.read("model.layers.1.mlp.experts.down_proj", (3, 0, 0), (1, 64, 64), torch.float32)
    assert back.dtype == torch.bfloat16
    assert torch.equal(ours[0].bfloat16(), back)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hf_model().save_pretrained(tmp_path / "hf")  # experts of 48 features
    export(open_source(tmp_path / "hf"), tmp_path / "int4", "hf", parse_dtype("int4", 16))
    return tmp_path / "int4"


def test_any_region_reads_as_part_of_the_whole(folder: Path) -> None:
    """As ranks read what they hold: some experts, some rows, some columns; across gate and up."""
    source, name = open_source(folder), "model.layers.2.mlp.experts.gate_up_proj"
    whole = source.read(name, (0, 0, 0), (8, 96, 64), torch.float32)
    assert whole.abs().amin() < whole.abs().amax()
    for start, size in [((0, 0, 0), (4, 96, 64)), ((3, 40, 0), (2, 17, 64)), ((5, 48, 8), (3, 48, 33))]:
        part = whole[tuple(slice(a, a + n) for a, n in zip(start, size))]
        assert torch.equal(source.read(name, start, size, torch.float32), part)
        assert torch.equal(source.read(name, start, size), part.bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_scale": None}, "'{key}_scale' is in no file"),
        ({"_shape": None}, "'{key}_shape' is in no file"),
        ({"_packed": None}, "'{key}' is in no file"),
        ({"_scale": torch.ones(64, 2)}, r"'{key}_scale' .* has shape \[64, 2\]; expected \[64, 3\]"),
        ({"_packed": torch.ones(64, 6)}, r"'{key}_packed' .* is of torch.float32; expected torch.int32"),
        ({"_scale": torch.ones(64, 3, dtype=torch.int64)}, r"'{key}_scale' .* is of torch.int64"),
        ({"": torch.ones(64, 48)}, "'{key}' is there twice: .* and in INT4"),
        ({"_g_idx": torch.ones(48, dtype=torch.int32)}, "'{key}_g_idx' .* is no tensor of this qwen3_moe model"),
    ],
)
def test_parts_that_are_missing_or_wrong(folder: Path, change: dict[str, Any], message: str) -> None:
    tensors = tensors_of(folder)
    for suffix, value in change.items():
        tensors.pop(KEY + suffix, None)
        if value is not None:
            tensors[KEY + suffix] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message.format(key=KEY)):
        open_source(folder)


def test_a_shape_that_contradicts_the_model(folder: Path) -> None:
    save_file(
        tensors_of(folder) | {KEY + "_shape": torch.tensor([48, 64], dtype=torch.int32)}, folder / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=rf"model.safetensors: '{KEY}_shape' is \[48, 64\]; expected \[64, 48\]"):
        open_source(folder).check_contents()


def test_words_without_a_declaration(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"proj.weight' is in no file"):
        open_source(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 8}, "num_bits is 8; expected 4"),
        ({"type": "float"}, "type is 'float'"),
        ({"strategy": "tensor"}, "strategy is 'tensor'; expected 'group' or 'channel'"),
        ({"actorder": "group"}, "actorder is 'group'"),
        ({"group_size": None}, "group_size is None"),
    ],
)
def test_other_forms_of_compressed_tensors(folder: Path, change: dict[str, Any], message: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"'compressed-tensors' .*{message}.*, which cannot be read"):
        open_source(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "int-quantized"}, "format is 'int-quantized'; expected 'pack-quantized'"),
        ({"config_groups": {}}, "it has no config_groups"),
    ],
)
def test_other_formats_of_compressed_tensors(change: dict[str, Any], message: str) -> None:
    declared = INT4Groups().declaration([]) | change
    with pytest.raises(ValueError, match=message):
        declared_int4(declared)
    declared = INT4Groups().declaration([])
    declared["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(ValueError, match="quantizes activations"):
        declared_int4(declared)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int4"], "has 48 columns, which groups of 32 do not divide. Choose another group size"),
        (["--dtype", "int4", "--group-size", "12"], "--group-size is 12: expected a multiple of 8"),
        (["--dtype", "int4", "--group-size", "0"], "--group-size is 0: expected a multiple of 8"),
        (["--dtype", "bfloat16", "--group-size", "16"], "--group-size is for --dtype int4"),
        (["--dtype", "int4", "--group-size", "16", "--experts", "fused"], "INT4 is written per expert only"),
        (["--dtype", "int4", "--group-size", "16", "--to", "native"], "INT4 is written per expert only"),
    ],
)
def test_what_the_command_refuses(tmp_path: Path, arguments: list[str], message: str) -> None:
    hf_model().save_pretrained(tmp_path / "hf")
    to = [] if "--to" in arguments else ["--to", "hf"]
    result = CliRunner().invoke(main, ["convert", str(tmp_path / "hf"), str(tmp_path / "x"), *to, *arguments])
    assert result.exit_code == 1
    assert message in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_values_that_are_not_finite_leave_nothing_behind(tmp_path: Path) -> None:
    model = hf_model(moe_intermediate_size=32)
    model.model.layers[1].mlp.experts.down_proj.data[3, 5, 7] = float("inf")
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=f"'{KEY}' holds values that are not finite"):
        export(open_source(tmp_path / "hf"), tmp_path / "x", "hf", parse_dtype("int4"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_the_command_writes_int4(tmp_path: Path) -> None:
    hf_model().save_pretrained(tmp_path / "hf")
    command = [
        "convert",
        str(tmp_path / "hf"),
        str(tmp_path / "x"),
        "--to",
        "hf",
        "--dtype",
        "int4",
        "--group-size",
        "24",
    ]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1, "groups of 24 do not divide 64 columns"
    result = CliRunner().invoke(main, [*command[:-1], "8"])
    assert result.exit_code == 0, result.output
    assert f"wrote {tmp_path / 'x'}: " in result.output
    assert " kB in " in result.output
    assert tensors_of(tmp_path / "x")[KEY + "_scale"].shape == (64, 6)
