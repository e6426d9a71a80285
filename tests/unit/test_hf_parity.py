"""The same weights give the same logits and gradients as transformers' Qwen3-MoE and DeepSeek-V3 (FP32, CPU)."""

import pytest
import torch

from equipoise.models import cross_entropy
from equipoise.models.config import ModelConfig
from equipoise.models.model import IGNORED_LABEL, MoEForCausalLM
from unit.hf_toys import deepseek_model, hf_model

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
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
}
DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
DEEPSEEK_VARIANTS = {
    "plain": {},
    "halves rotated": {"rope_interleave": False},
    "full query projection": {"q_lora_rank": None},
    "yarn": {"rope_scaling": DEEPSEEK_YARN},
    "yarn to whole frequencies": {"rope_scaling": {**DEEPSEEK_YARN, "mscale_all_dim": 0, "truncate": False}},
    "attention bias": {"attention_bias": True},
    "no dense layers, two shared": {"first_k_dense_replace": 0, "n_shared_experts": 2},
    "weights as they are": {"norm_topk_prob": False},
    "tied embeddings": {"tie_word_embeddings": True},
}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_and_every_gradient(changes: dict, recompute: str) -> None:
    check_logits_and_every_gradient(hf_model(**changes), recompute)


@pytest.mark.parametrize("changes", DEEPSEEK_VARIANTS.values(), ids=DEEPSEEK_VARIANTS.keys())
def test_logits_and_every_gradient_of_deepseek(changes: dict) -> None:
    check_logits_and_every_gradient(deepseek_model(**changes), "none")


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_latent_attention_recomputed(recompute: str) -> None:
    check_logits_and_every_gradient(deepseek_model(), recompute)


def check_logits_and_every_gradient(theirs, recompute: str) -> None:
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


@pytest.mark.parametrize("theirs", [hf_model, deepseek_model])
def test_packed_documents_equal_separate_ones(theirs) -> None:
    """Document-masked attention with restarting positions: each document as if it were alone."""
    theirs = theirs()
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
        ({"model_type": "gpt_oss"}, "'gpt_oss' cannot be read: only 'qwen3_moe', 'deepseek_v3', 'qwen3_vl_moe'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "'llama3' is not supported"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"model_type": "deepseek_v3", "topk_method": "greedy"}, "topk_method is 'greedy'"),
    ],
)
def test_unsupported_features_are_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({"model_type": "qwen3_moe"} | changes)
