"""Hugging Face folders to ours and back: byte-equal per tensor, and the same model in transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from equipoise.accelerator import VARIABLE, reset
from equipoise.checkpoint import hf
from equipoise.checkpoint.hf import HFMapping, export, native_to_hf, open_source
from equipoise.checkpoint.training import TrainingState, save_checkpoint
from equipoise.cli import main
from equipoise.errors import CheckpointError
from equipoise.models.config import ModelConfig
from equipoise.models.initialize import initialize_model
from equipoise.models.model import MoEForCausalLM
from unit.hf_toys import assert_same_tensors, deepseek_model, hf_model, save_vision_language_model, tensors_of
from unit.test_checkpoint import WORLD

MODELS = {
    "qwen3_moe": lambda: hf_model(),
    "qwen3_moe, tied": lambda: hf_model(tie_word_embeddings=True, mlp_only_layers=[1]),
    "deepseek_v3": lambda: deepseek_model(),
    "deepseek_v3, full queries": lambda: deepseek_model(q_lora_rank=None, attention_bias=True),
}


def convert(source: Path, target: Path, to: str, **options) -> Path:
    opened = open_source(source)
    try:
        return export(opened, target, to, **options)
    finally:
        opened.close()


def read_model(folder: Path, **options) -> MoEForCausalLM:
    """Our model with a folder's weights, whole, on this process."""
    source = open_source(folder)
    model = MoEForCausalLM(source.config.model_copy(update=options))
    values = {n: source.read(n, (0,) * len(s.shape), s.shape, torch.float32) for n, s in source.tensors.items()}
    source.close()
    if model.config.tie_word_embeddings:
        values["lm_head.weight"] = values["model.embed_tokens.weight"]
    model.load_state_dict(values)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_there_and_back_is_byte_equal(make, dtype: torch.dtype, tmp_path: Path) -> None:
    make().to(dtype).save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    convert(tmp_path / "hf", tmp_path / "native", "native", shard_bytes=90_000)
    back = convert(tmp_path / "native", tmp_path / "back", "hf", shard_bytes=70_000)
    assert_same_tensors(back, tmp_path / "hf")
    assert json.loads((back / "config.json").read_text()) == json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (back / "tokenizer.json").exists()
    assert any("experts.gate_up_proj" in key for key in tensors_of(tmp_path / "native"))


@pytest.mark.parametrize("make", [hf_model, deepseek_model])
def test_fused_and_per_expert_files_give_equal_models(make, tmp_path: Path) -> None:
    """C39 (a), (b)."""
    make().save_pretrained(tmp_path / "single")
    fused = convert(tmp_path / "single", tmp_path / "fused", "hf", experts="fused")
    keys = tensors_of(fused).keys()
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in keys)
    assert not any(".experts.0." in key for key in keys)
    assert_same_tensors(convert(fused, tmp_path / "back", "hf"), tmp_path / "single")
    a, b = read_model(tmp_path / "single").state_dict(), read_model(fused).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_transformers_reads_fused_files_as_the_same_model(tmp_path: Path) -> None:
    theirs = hf_model()
    theirs.save_pretrained(tmp_path / "single")
    fused = convert(tmp_path / "single", tmp_path / "fused", "hf", experts="fused")
    read = AutoModelForCausalLM.from_pretrained(fused)
    assert all(torch.equal(a, b) for a, b in zip(read.state_dict().values(), theirs.state_dict().values(), strict=True))


def save_training(model: MoEForCausalLM, folder: Path) -> Path:
    """A training checkpoint of the model."""
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingState(model, optimizer, step=3, config={"model": model.config.model_dump(mode="json")})
    return save_checkpoint(folder, state, WORLD)


@pytest.mark.parametrize("make", [hf_model, deepseek_model])
def test_transformers_generates_what_we_do_from_a_training_checkpoint(make, tmp_path: Path) -> None:
    """Greedy, so the first different logit would show."""
    config = ModelConfig.from_hf(make().config.to_dict())
    ours = MoEForCausalLM(config.model_copy(update={"initializer_range": 0.3}))
    initialize_model(ours, seed=5)
    checkpoint = save_training(ours, tmp_path / "run" / "checkpoints")
    exported = convert(checkpoint, tmp_path / "hf", "hf")
    theirs = AutoModelForCausalLM.from_pretrained(exported)
    assert theirs.dtype == torch.float32
    prompt = torch.randint(0, 97, (2, 5), generator=torch.Generator().manual_seed(3))
    generated = theirs.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    ids = prompt
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat([ids, ours(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generated, ids)
    assert ids.unique().numel() > 5
    assert_same_tensors(convert(tmp_path / "run", tmp_path / "newest", "hf"), exported)


def test_transposed_experts_of_a_declared_type(tmp_path: Path) -> None:
    """Square matrices, whose shape tells nothing; the vision tower is left out."""
    theirs = save_vision_language_model(tmp_path / "hf")
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(3))
    ours = read_model(tmp_path / "hf")
    want = theirs(input_ids=ids).logits
    assert (ours(ids).logits - want).norm() <= 1e-5 * want.norm()
    written = convert(tmp_path / "hf", tmp_path / "text", "hf")
    text = AutoModelForCausalLM.from_pretrained(written)
    assert type(text).__name__ == "Qwen3MoeForCausalLM"
    assert (text(ids).logits - want).norm() <= 1e-5 * want.norm()
    tensors = tensors_of(tmp_path / "hf")
    for key in tensors:
        if "mlp.experts." in key:
            tensors[key] = tensors[key].transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.down_proj' .* has shape \[8, 64, 32\]; expected \[8, 32,"):
        open_source(tmp_path / "hf")


def mtp_model(num_layers: int = 2) -> MoEForCausalLM:
    config = ModelConfig.from_hf(deepseek_model().config.to_dict())
    model = MoEForCausalLM(ModelConfig(**(config.model_dump() | {"num_nextn_predict_layers": num_layers})))
    initialize_model(model, seed=2)
    return model


def save_mtp(folder: Path, num_layers: int = 2) -> dict[str, torch.Tensor]:
    """A folder with layers that predict further tokens, as the released one; its tensors."""
    model = mtp_model(num_layers)
    mapping = HFMapping(model.config)
    tensors = {key: t.clone() for key, t in native_to_hf(mapping, model.state_dict().items())}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf.hf_config(mapping)))
    return tensors


def test_layers_that_predict_further_tokens_keep_their_copies(tmp_path: Path) -> None:
    tensors = save_mtp(tmp_path / "hf")
    assert torch.equal(tensors["model.layers.4.shared_head.head.weight"], tensors["lm_head.weight"])
    assert torch.equal(tensors["model.layers.3.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    convert(tmp_path / "hf", tmp_path / "native", "native")
    assert_same_tensors(convert(tmp_path / "native", tmp_path / "back", "hf"), tmp_path / "hf")
    read = read_model(tmp_path / "hf").state_dict()
    assert all(torch.equal(read[name], value) for name, value in mtp_model().state_dict().items())


def test_a_copy_that_differs_from_its_original_is_refused(tmp_path: Path) -> None:
    tensors = save_mtp(tmp_path / "hf")
    tensors["model.layers.4.shared_head.head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.4\.shared_head\.head\.weight.*differs from 'lm_head\.weight'"):
        convert(tmp_path / "hf", tmp_path / "native", "native")
    assert not (tmp_path / "native").exists()


def test_copies_may_be_absent_and_further_layers_left_out(tmp_path: Path) -> None:
    tensors = save_mtp(tmp_path / "hf")
    kept = {k: t for k, t in tensors.items() if "embed_tokens" not in k or "layers" not in k}
    save_file(kept, tmp_path / "hf" / "model.safetensors")
    assert open_source(tmp_path / "hf").config.num_nextn_predict_layers == 2
    source = hf.FolderSource(tmp_path / "hf", mtp_model(0).config)
    assert not any("layers.3." in name for name in source.tensors)


def test_declared_further_layers_that_no_file_holds_are_not_there(tmp_path: Path, caplog) -> None:
    """transformers drops them when it saves and keeps their number; some of their tensors missing is an error."""
    deepseek_model(num_nextn_predict_layers=1).save_pretrained(tmp_path / "hf")
    assert open_source(tmp_path / "hf").config.num_nextn_predict_layers == 0
    assert "declares 1 multi-token-prediction layers but holds none" in caplog.text
    tensors = save_mtp(tmp_path / "part")
    del tensors["model.layers.4.eh_proj.weight"]
    save_file(tensors, tmp_path / "part" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model\.layers\.4\.eh_proj\.weight' is in no file"):
        open_source(tmp_path / "part")


def test_parts_of_the_experts_convert_by_their_numbers() -> None:
    """What a rank of an EP group holds."""
    config = ModelConfig.from_hf(hf_model().config.to_dict())
    model = MoEForCausalLM(config)
    initialize_model(model, seed=1)
    mapping = HFMapping(config)
    whole = dict(native_to_hf(mapping, model.state_dict().items()))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    part = dict(mapping.to_hf(name, model.state_dict()[name][3:5], first_expert=3))
    assert sorted(part) == [
        f"model.layers.1.mlp.experts.{e}.{half}_proj.weight" for e in (3, 4) for half in ("gate", "up")
    ]
    assert all(torch.equal(part[key], whole[key]) for key in part)
    with pytest.raises(CheckpointError, match=r"shape \[7\]; expected \[64\]"):
        list(mapping.to_hf("model.norm.weight", torch.zeros(7)))


def test_every_tensor_of_ours_is_in_exactly_one_place() -> None:
    """Pieces tile each parameter: every element once."""
    for model in (hf_model(), deepseek_model()):
        for experts in ("per_expert", "fused"):
            mapping = HFMapping(ModelConfig.from_hf(model.config.to_dict()), experts=experts)
            for name, stored in mapping.tensors.items():
                seen = torch.zeros(stored.shape)
                for piece in mapping.pieces(name):
                    seen[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size))] += 1
                assert (seen == 1).all(), name


def test_a_model_without_a_family_says_what_does_not_fit() -> None:
    with pytest.raises(CheckpointError, match=r"no Hugging Face family .* qwen3_moe: n_shared_experts is 1"):
        HFMapping(ModelConfig(n_shared_experts=1))


def test_changed_settings_reach_config_json(tmp_path: Path) -> None:
    theirs = hf_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    theirs.config.save_pretrained(tmp_path)
    original = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": 7, "note": "kept"}
    same = ModelConfig.from_hf(original)
    assert hf.hf_config(HFMapping(same), original) == original
    longer = same.model_copy(update={"max_position_embeddings": 99, "tie_word_embeddings": True})
    written = hf.hf_config(HFMapping(longer), original)
    assert (written["eos_token_id"], written["note"]) == (7, "kept")
    assert ModelConfig.from_hf(written) == longer


def test_nothing_is_overwritten_and_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    hf_model().save_pretrained(tmp_path / "hf")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="there already"):
        convert(tmp_path / "hf", tmp_path / "there", "native")
    with monkeypatch.context() as patch:

        def full(*args):
            raise OSError(28, "No space left on device")

        patch.setattr("os.pwrite", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            convert(tmp_path / "hf", tmp_path / "native", "native")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "there"]
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
        with pytest.raises(CheckpointError, match="free, and the model needs"):
            convert(tmp_path / "hf", tmp_path / "native", "native")
    convert(tmp_path / "hf", tmp_path / "native", "native")


@pytest.mark.parametrize("dtype", ["w4a16", "float7"])
def test_dtypes_that_cannot_be_written_are_refused(dtype: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{dtype}' cannot be written: choose one of float32, bfloat16"):
        hf.parse_dtype(dtype)


def test_the_command_needs_no_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is selected: a variable that names none goes unread. Errors have no traceback and exit 1."""
    hf_model().save_pretrained(tmp_path / "hf")
    reset()
    monkeypatch.setenv(VARIABLE, "none such")
    command = ["convert", str(tmp_path / "hf"), str(tmp_path / "native"), "--to", "native", "--dtype", "bfloat16"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert f"wrote {tmp_path / 'native'}: " in done.output
    assert " kB in " in done.output
    assert {t.dtype for t in tensors_of(tmp_path / "native").values()} == {torch.bfloat16}
    again = CliRunner().invoke(main, command)
    assert again.exit_code == 1
    assert "is there already and is not overwritten" in again.output
    assert "Traceback" not in again.output


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    hf_model().save_pretrained(tmp_path / "hf")
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        (["hf", "x", "--to", "native", "--experts", "fused"], "--experts is for --to hf"),
        (["hf", "x", "--to", "hf", "--experts", "fused", "--dtype", "float8_e4m3"], "FP8 is written per expert only"),
        (["none", "x", "--to", "hf"], "there is no folder"),
        (["empty", "x", "--to", "hf"], "holds no model: expected a folder with config.json"),
    ):
        paths = [str(tmp_path / name) for name in arguments[:2]]
        result = CliRunner().invoke(main, ["convert", *paths, *arguments[2:]])
        assert result.exit_code in (1, 2), arguments
        assert message in result.output
        assert not (tmp_path / "x").exists()
