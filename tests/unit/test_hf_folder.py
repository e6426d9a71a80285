"""C39, C41: a Hugging Face folder that is not whole, or not of this model, is an error that names key and file."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from equipoise.checkpoint.hf import export, open_source
from equipoise.checkpoint.hf.folder import HFFolder
from equipoise.checkpoint.hf.safetensors_file import SafetensorsReader
from equipoise.errors import CheckpointError
from unit.hf_toys import deepseek_model, hf_model, tensors_of

INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.experts.5.up_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Several shards and their index."""
    path = tmp_path / "hf"
    hf_model().save_pretrained(path, max_shard_size="100KB")
    return path


def index_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit(folder: Path, key: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Rewrites the file that holds `key`."""
    file = folder / index_of(folder)[key]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return file


def refuse(folder: Path, *words: str) -> None:
    """Opening fails with all words in the message, and a conversion leaves nothing."""
    with pytest.raises(CheckpointError) as caught:
        open_source(folder)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
    with pytest.raises(CheckpointError):
        export(open_source(folder), folder.parent / "native", "native")
    assert not (folder.parent / "native").exists()


def test_a_model_of_other_sizes_is_told_by_its_settings(folder: Path) -> None:
    source = open_source(folder)
    source.close()
    experts = source.config.num_experts
    other = source.config.model_copy(update={"num_experts": 2 * experts, "rope_theta": 1.0})
    with pytest.raises(CheckpointError) as caught:
        HFFolder(folder, other)
    told = f"model.num_experts: {folder / 'config.json'} has {experts}, this run has {2 * experts}. So '"
    assert str(caught.value).startswith(told)
    HFFolder(folder, source.config.model_copy(update={"rope_theta": 1.0})).close()


def test_a_missing_shard(folder: Path) -> None:
    file = index_of(folder)[UP]
    (folder / file).unlink()
    refuse(folder, file, "is missing", INDEX)


@pytest.mark.parametrize("cut", [1, 100, 50_000])
def test_a_short_shard(folder: Path, cut: int) -> None:
    file = folder / index_of(folder)[UP]
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - cut)
    refuse(folder, str(file), "cut short", "ends at byte")


@pytest.mark.parametrize("size", [0, 5, 8, 40])
def test_a_shard_cut_in_its_header(folder: Path, size: int) -> None:
    file = folder / index_of(folder)[UP]
    with file.open("r+b") as handle:
        handle.truncate(size)
    refuse(folder, str(file), "cut short or no safetensors file")


def test_an_index_key_that_its_shard_lacks(folder: Path) -> None:
    file = edit(folder, UP, lambda tensors: tensors.pop(UP))
    refuse(folder, repr(UP), str(file), "where model.safetensors.index.json says it is")


def test_a_key_in_two_shards(folder: Path) -> None:
    other = next(file for file in index_of(folder).values() if file != index_of(folder)[UP])
    tensors = load_file(folder / other)
    save_file(tensors | {UP: torch.zeros(48, 64)}, folder / other)
    refuse(folder, repr(UP), other, f"says it is in {index_of(folder)[UP]}")


def test_a_key_that_the_index_does_not_list(folder: Path) -> None:
    weight_map = index_of(folder)
    del weight_map[UP]
    write_index(folder, weight_map)
    refuse(folder, repr(UP), "does not list it")


def test_an_extra_shard_is_ignored(folder: Path) -> None:
    save_file({"other": torch.zeros(3)}, folder / "model-00099-of-00099.safetensors")
    export(open_source(folder), folder.parent / "native", "native")
    assert (folder.parent / "native").is_dir()
    assert not any("other" in file.name for file in (folder.parent / "native").iterdir())


def test_a_key_that_no_shard_has(folder: Path) -> None:
    """C39 (e): never random."""
    edit(folder, UP, lambda tensors: tensors.pop(UP))
    weight_map = index_of(folder)
    del weight_map[UP]
    write_index(folder, weight_map)
    refuse(folder, repr(UP), "is in no file of", "[48, 64]")


def test_a_key_that_the_model_lacks(folder: Path) -> None:
    edit(folder, NORM, lambda tensors: tensors.update(surplus=torch.zeros(2)))
    write_index(folder, index_of(folder) | {"surplus": index_of(folder)[NORM]})
    refuse(folder, "'surplus'", index_of(folder)[NORM], "is no tensor of this qwen3_moe model")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(64, 48), "has shape [64, 48]; expected [48, 64]"),  # transposed: never guessed
        (torch.zeros(48, 64, dtype=torch.int32), "no dtype of weights"),
        (torch.zeros(48, 64).to(torch.float8_e4m3fn), "without"),
    ],
)
def test_a_tensor_of_another_shape_or_dtype(folder: Path, value: torch.Tensor, message: str) -> None:
    file = edit(folder, UP, lambda tensors: tensors.update({UP: value}))
    refuse(folder, repr(UP), str(file), message)


def test_both_forms_of_the_experts(folder: Path) -> None:
    """C39 (c)."""
    stacked = "model.layers.1.mlp.experts.down_proj"
    edit(folder, NORM, lambda tensors: tensors.update({stacked: torch.zeros(8, 64, 48)}))
    write_index(folder, index_of(folder) | {stacked: index_of(folder)[NORM]})
    refuse(folder, "the experts are there twice", repr(stacked), index_of(folder)[NORM])


def test_a_key_twice_in_one_header(tmp_path: Path) -> None:
    value = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = f'{{"a":{value},"a":{value}}}'.encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match=r"'a' is twice in .*x\.safetensors"):
        SafetensorsReader(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "takes 4 bytes, but shape"),
        ('{"a":{"dtype":"F6","shape":[1],"data_offsets":[0,4]}}', "dtype F6, which is not supported"),
        ('{"a":{"dtype":"F32","shape":[1]}}', "unreadable header"),
        ('{"a":', "unreadable header"),
        ("[]", "unreadable header"),
    ],
)
def test_a_header_that_makes_no_sense(tmp_path: Path, header: str, message: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
    with pytest.raises(CheckpointError, match=message):
        SafetensorsReader(tmp_path / "x.safetensors")


def test_an_index_that_leads_out_of_the_folder(folder: Path) -> None:
    write_index(folder, index_of(folder) | {NORM: "../model.safetensors"})
    refuse(folder, "'../model.safetensors'", "no file of the folder")


def test_tied_embeddings_with_a_head_of_their_own(tmp_path: Path) -> None:
    """A second copy of the embedding is dropped, another matrix is an error."""
    hf_model(tie_word_embeddings=True).save_pretrained(tmp_path / "hf")
    tensors = tensors_of(tmp_path / "hf")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    export(open_source(tmp_path / "hf"), tmp_path / "native", "native")
    assert "lm_head.weight" not in tensors_of(tmp_path / "native")
    tensors["lm_head.weight"][5, 5] += 1
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' .* differs from 'model\.embed_tokens\.weight'"):
        export(open_source(tmp_path / "hf"), tmp_path / "other", "native")


def test_untied_embeddings_without_a_head(tmp_path: Path) -> None:
    hf_model(tie_word_embeddings=True).save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    refuse(tmp_path / "hf", "'lm_head.weight' is in no file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt_oss"}, "model_type 'gpt_oss' cannot be read"),
        ({"num_experts_per_tok": 99}, "num_experts_per_tok is 99"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
            "no config_groups",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"'gptq' \(bits: 4"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, r"\[64, 64\]"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size None"),
    ],
)
def test_a_config_that_cannot_be_read(folder: Path, change: dict, message: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=message):
        open_source(folder)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_no_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_source(folder)


def test_a_folder_of_pickles(tmp_path: Path) -> None:
    model = deepseek_model()
    model.config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"there are pytorch_model\.bin\. Only safetensors files are read"):
        open_source(tmp_path)


def test_the_index_that_is_written_lists_what_is_in_the_files(folder: Path) -> None:
    """C41 (e)."""
    target = export(open_source(folder), folder.parent / "out", "hf", shard_bytes=120_000)
    index = json.loads((target / INDEX).read_text())
    found, size = {}, 0
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        size += sum(t.numel() * t.itemsize for t in tensors.values())
        assert size <= 120_000 * len(index["weight_map"])
        found |= dict.fromkeys(tensors, file.name)
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == size
    assert len(set(found.values())) > 3
