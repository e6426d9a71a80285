"""The same weights give the same logits and gradients as transformers' Qwen3-MoE (FP32, CPU)."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from equipoise.models import cross_entropy
from equipoise.models.config import ModelConfig
from equipoise.models.model import IGNORED_LABEL, MoEForCausalLM

VARIANTS = {
    "plain": {},
    "normalised top-k": {"norm_topk_prob": True},
    "dense layers by list": {"mlp_only_layers": [0, 2]},
    "dense layers by step": {"decoder_sparse_step": 2},
    "tied embeddings": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "no grouped queries": {"num_key_value_heads": 4},
    "one key head, top 1": {"num_key_value_heads": 1, "num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 8},
    "rotary base": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}


def hf_model(**changes) -> Qwen3MoeForCausalLM:
    values = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "initializer_range": 0.2,
        "use_cache": False,
    }
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(values | changes)))
    for name, parameter in model.named_parameters():  # norms and biases start as constants: make them count
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_and_every_gradient(changes: dict, recompute: str) -> None:
    theirs = hf_model(**changes)
    ours = MoEForCausalLM(ModelConfig.from_hf(theirs.config.to_dict()))
    ours.load_state_dict(theirs.state_dict())
    for layer in ours.model.layers:
        layer.recompute = recompute
    ids = torch.randint(0, 97, (2, 33), generator=torch.Generator().manual_seed(1))
    labels = torch.cat([ids[:, 1:], torch.full((2, 1), IGNORED_LABEL)], dim=1)

    expected = theirs(input_ids=ids, labels=ids)
    expected.loss.backward()
    assert relative(ours(ids).logits, expected.logits) <= 1e-5
    (ours(ids, labels).loss_sum / 64).backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert relative(parameter.grad, gradients[name].grad) <= 1e-5, name


def test_loss_in_chunks_equals_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are never held beyond a bound; the loss and its gradients do not depend on it."""
    model = MoEForCausalLM(ModelConfig(vocab_size=64, num_hidden_layers=1, hidden_size=32, moe_intermediate_size=16))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(0, 64, (3, 17))
    labels = ids.roll(-1, 1)
    labels[0, :5] = IGNORED_LABEL
    results = []
    for elements in (1 << 26, 64 * 7, 1):
        monkeypatch.setitem(cross_entropy._CHUNK_ELEMENTS, "cpu", elements)
        model.zero_grad()
        loss = model(ids, labels).loss_sum
        loss.backward()
        results.append((loss.item(), model.lm_head.weight.grad.clone(), model.model.embed_tokens.weight.grad.clone()))
    for loss, head, embedding in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        assert relative(head, results[0][1]) <= 1e-5
        assert relative(embedding, results[0][2]) <= 1e-5


def test_packed_documents_equal_separate_ones() -> None:
    """Document-masked attention with restarting positions: each document as if it were alone."""
    theirs = hf_model()
    ours = MoEForCausalLM(ModelConfig.from_hf(theirs.config.to_dict()))
    ours.load_state_dict(theirs.state_dict())
    lengths = [[5, 1, 11], [17]]
    ids = torch.randint(0, 97, (2, 17), generator=torch.Generator().manual_seed(2))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    packed = ours(ids, position_ids_BS=positions, document_ids_BS=documents).logits
    for row, sizes in enumerate(lengths):
        parts = ids[row].split(sizes)
        alone = torch.cat([theirs(input_ids=part[None]).logits[0] for part in parts])
        assert relative(packed[row], alone) <= 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "only 'qwen3_moe'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        ({"use_sliding_window": True}, "sliding-window"),
    ],
)
def test_unsupported_features_are_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({"model_type": "qwen3_moe"} | changes)
