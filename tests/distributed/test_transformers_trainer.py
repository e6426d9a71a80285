"""transformers' Trainer fine-tunes a Qwen3-MoE on two ranks, full and by LoRA, with balancing off and on: the losses of
one process. With gradient checkpointing, accumulation and clipping, as people run it."""

import gc
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.harness import run_ranks
from distributed.test_transformers import VOCAB, missing, save_with_a_hot_rank
from equipoise.balance import BalanceConfig
from equipoise.integrations import transformers as adapter
from equipoise.integrations.peft import adapt_experts

STEPS, LENGTH, SEQUENCES_PER_STEP = 3, 19, 8
KINDS = ("full", "LoRA on attention", "LoRA on experts", "full in BF16")
LIMITS = {"full in BF16": (1e-2, 2e-2)}  # products are summed in another order
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        bool(missing()) or importlib.util.find_spec("peft") is None, reason="needs transformers' registry and peft"
    ),
]


def adapters(kind: str) -> Any:
    from peft import LoraConfig

    where: dict[str, list[str]] = {"target_modules": ["q_proj", "v_proj"]}
    if kind == "LoRA on experts":
        where["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, init_lora_weights=False, **where)


def loss_of(model: Any) -> float:
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        return float(model.eval()(input_ids=ids, labels=ids).loss)


def losses(folder: Path, out: Path, kind: str, implementation: str) -> tuple[list[float], float]:
    """Loss of each step and the gradient norms after them; the loss of some other text, of the model saved in `out`."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
    from transformers.distributed import DistributedConfig

    ranks = int(os.environ["WORLD_SIZE"])
    options: dict[str, Any] = {}
    if ranks > 1:
        options["distributed_config"] = DistributedConfig(
            ep_size=ranks, fsdp_size=ranks, ep_implementation=implementation
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **options)
    if kind.startswith("LoRA"):
        torch.manual_seed(3)
        model = get_peft_model(model, adapters(kind))
        if kind == "LoRA on experts" and ranks > 1:
            model = adapt_experts(model)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (SEQUENCES_PER_STEP, LENGTH), generator=generator)
    arguments = TrainingArguments(
        output_dir=str(out / f"checkpoints of {kind}, {implementation}"),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=SEQUENCES_PER_STEP // 2 // ranks,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        learning_rate=1e-2,
        logging_steps=1,
        bf16=kind.endswith("BF16"),
        save_strategy="steps" if kind == "full" else "no",  # the Trainer's default, with what docs/finetuning.md adds
        save_steps=STEPS,
        save_only_model=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    trainer.save_model(str(out / f"{kind}, {implementation}"))
    return [entry["loss"] for entry in logs] + [entry["grad_norm"] for entry in logs], loss_of(trainer.model)


def fine_tune(folder: Path, out: Path) -> dict[str, list[float]]:
    several = int(os.environ["WORLD_SIZE"]) > 1
    if several:
        torch.distributed.init_process_group("gloo")
    adapter.register(BalanceConfig(tolerance=0.0))
    adapter.register(BalanceConfig(tolerance=1000), "unbalanced")  # transformers' own EP and peft on experts do not mix
    found: dict[str, Any] = {}
    for kind in KINDS:
        off = "unbalanced" if kind == "LoRA on experts" else "all_to_all"
        for implementation in (off, "equipoise") if several else ("alone",):
            gc.collect()
            name = "off" if implementation == off else implementation
            found[f"{kind}, {name}"], found[f"{kind}, {name}, saved"] = losses(folder, out, kind, implementation)
            if implementation == "equipoise":
                dtype = torch.bfloat16 if kind.endswith("BF16") else torch.float32  # as it was computed
                balancers = [b for b in adapter._balancers.values() if b.config.tolerance == 0 and b.dtype == dtype]
                found[f"{kind}, copies"] = sum(record.copies for b in balancers for record in b.take_records())
    if several:
        torch.distributed.destroy_process_group()
    return found


def load_saved(folder: Path, out: Path) -> dict[str, float]:
    """Loss of what two balanced ranks have saved, loaded in one process; for adapters, also merged."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    checkpoint = out / "checkpoints of full, equipoise" / f"checkpoint-{STEPS}"
    saved = {"full": out / "full, equipoise", "full, checkpoint": checkpoint}
    found = {name: loss_of(AutoModelForCausalLM.from_pretrained(path, **options)) for name, path in saved.items()}
    for kind in ("LoRA on attention", "LoRA on experts"):
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
        model = PeftModel.from_pretrained(model, out / f"{kind}, equipoise")
        found[kind] = loss_of(model)
        found[f"{kind}, merged"] = loss_of(model.merge_and_unload())
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_a_hot_rank("Qwen3Moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(fine_tune, 2, folder, folder / "out", deadline_s=600)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_without_balancing(two: list[dict[str, Any]], kind: str) -> None:
    for rank in two:
        found = rank[f"{kind}, equipoise"]
        assert found == pytest.approx(rank[f"{kind}, off"], rel=LIMITS.get(kind, (1e-5, 1e-4))[0])
        assert found[0] - found[STEPS - 1] > 0.01, "every step has the same sequences, and it learns them"
        assert rank[f"{kind}, copies"] > 0


def test_losses_are_those_of_one_process(folder: Path, two: list[dict[str, Any]]) -> None:
    (single,) = run_ranks(fine_tune, 1, folder, folder / "out", deadline_s=300)
    for kind in KINDS:
        for rank in two:
            limit = LIMITS.get(kind, (1e-5, 1e-4))[1]
            assert rank[f"{kind}, equipoise"] == pytest.approx(single[f"{kind}, alone"], rel=limit)


def test_what_is_saved_loads_in_one_process(folder: Path, two: list[dict[str, Any]]) -> None:
    (found,) = run_ranks(load_saved, 1, folder, folder / "out", deadline_s=300)
    for name, loss in found.items():
        kind = name.partition(",")[0]
        assert loss == pytest.approx(two[0][f"{kind}, equipoise, saved"], rel=1e-5), name
