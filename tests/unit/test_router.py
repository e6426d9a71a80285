"""Router arithmetic: weights, FP32 bias, agreement with Hugging Face."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from equipoise.models.config import ModelConfig
from equipoise.moe.bias import update_selection_bias
from equipoise.moe.losses import balance_loss, z_loss
from equipoise.moe.router import Router, RouterConfig


def make_router(**changes) -> Router:
    values = {"hidden_size": 4, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True} | changes
    router = Router(RouterConfig(**values))
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    return router


def router_giving(logits: list[float], **changes) -> tuple[Router, torch.Tensor]:
    """A router and an input of one token that produce these logits exactly."""
    router = make_router(hidden_size=1, num_experts=len(logits), **changes)
    router.weight.data = torch.tensor(logits)[:, None]
    return router, torch.ones(1, 1)


@pytest.mark.parametrize(("normalised", "expected"), [(True, [0.7311, 0.2689]), (False, [0.6439, 0.2369])])
def test_top_k_weights_follow_norm_topk_prob(normalised: bool, expected: list[float]) -> None:
    """cases.md C05."""
    router, x = router_giving([2.0, 1.0, 0.0, -1.0], norm_topk_prob=normalised)
    assert router(x).weights_TK[0].tolist() == pytest.approx(expected, abs=5e-5)


def test_config_without_norm_topk_prob_takes_the_family_default() -> None:
    """cases.md C05: absent is false in Qwen3-MoE's configuration class, whatever our own default is."""
    assert ModelConfig.from_hf({"model_type": "qwen3_moe"}).norm_topk_prob is False
    assert ModelConfig.from_hf({"model_type": "qwen3_moe", "norm_topk_prob": True}).norm_topk_prob is True


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: torch.nn.Sequential(m).to(torch.bfloat16)[0],
        lambda m: copy.deepcopy(m).bfloat16(),
        lambda m: pickle.loads(pickle.dumps(m.bfloat16())),
    ],
)
def test_bias_stays_fp32_when_the_model_is_cast(change) -> None:
    """cases.md C03 (a): in BF16 only 9 distinct values would remain."""
    router = make_router(num_experts=256, num_experts_per_tok=8, selection_bias=True)
    router.e_score_correction_bias.copy_(torch.linspace(6.817, 7.063, 256))
    before = router.e_score_correction_bias.clone()
    cast = change(router)
    assert cast.weight.dtype != torch.float32
    assert torch.equal(cast.e_score_correction_bias, before)
    state = cast.state_dict()["e_score_correction_bias"]
    assert torch.equal(state, before)
    loaded = make_router(num_experts=256, num_experts_per_tok=8, selection_bias=True).bfloat16()
    loaded.load_state_dict(cast.state_dict())
    assert torch.equal(loaded.e_score_correction_bias, before)


def test_weights_come_from_the_unbiased_sigmoid() -> None:
    """cases.md C03 (b): all logits -18 with bias 12; (score + bias) - bias would be 0 in FP32."""
    router, x = router_giving(
        [-18.0] * 8, scoring_func="sigmoid", selection_bias=True, routed_scaling_factor=2.5, num_experts_per_tok=4
    )
    router.e_score_correction_bias.fill_(12.0)
    weights = router(x).weights_TK
    assert torch.isfinite(weights).all()
    assert weights.sum().item() == pytest.approx(2.5, rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_equals_the_deepseek_v3_router_of_transformers(seed: int) -> None:
    """Chosen experts, weights and the router's gradient, with biases of both signs and group-limited routing."""
    torch.manual_seed(seed)
    config = DeepseekV3Config(
        hidden_size=32,
        moe_intermediate_size=16,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    theirs = DeepseekV3MoE(config)
    torch.nn.init.normal_(theirs.gate.weight)
    theirs.gate.e_score_correction_bias.copy_(torch.rand(16) * 0.4)  # positive: transformers masks with 0 (C04)
    ours = make_router(
        hidden_size=32,
        num_experts=16,
        num_experts_per_tok=4,
        scoring_func="sigmoid",
        selection_bias=True,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    )
    ours.load_state_dict(theirs.gate.state_dict())
    x = torch.randn(50, 32)
    _, their_weights, their_ids = theirs.gate(x)
    routing = ours(x)
    order, their_order = routing.ids_TK.long().argsort(1), their_ids.argsort(1)
    assert torch.equal(routing.ids_TK.long().gather(1, order), their_ids.gather(1, their_order))
    a, b = routing.weights_TK.gather(1, order), their_weights.gather(1, their_order)
    assert (a - b).norm() / b.norm() <= 1e-6
    scale = torch.randn_like(b)
    (a * scale).sum().backward()
    (b * scale).sum().backward()
    assert (ours.weight.grad - theirs.gate.weight.grad).norm() / theirs.gate.weight.grad.norm() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arithmetic_is_fp32_whatever_the_input(dtype: torch.dtype) -> None:
    router = make_router().to(dtype)
    x = torch.randn(9, 4, dtype=dtype)
    routing = router(x)
    assert routing.weights_TK.dtype == torch.float32
    expected = F.linear(x.float(), router.weight.float()).softmax(-1).topk(2).values
    torch.testing.assert_close(routing.weights_TK, expected / expected.sum(-1, keepdim=True))


def one_hot_probabilities(expert: int, num_tokens: int) -> torch.Tensor:
    return F.one_hot(torch.full((num_tokens,), expert), 2).float()


def test_balance_loss_is_per_layer() -> None:
    """cases.md C06 (a): two layers, each fully skewed to another expert. Pooled counts would look balanced (1.0)."""
    losses = [
        balance_loss(one_hot_probabilities(e, 4), F.one_hot(torch.tensor(e), 2).int() * 4, None, 1) for e in (0, 1)
    ]
    assert [loss.item() for loss in losses] == [2.0, 2.0]


def test_balance_loss_takes_the_softmax_once() -> None:
    """cases.md C06 (b): mean probability of expert 0 is 0.948; a double softmax gives 0.458."""
    router, x = router_giving([4.0, 0.0, 0.0, 0.0], num_experts_per_tok=1, aux_loss=True)
    assert router(x).aux_loss.item() == pytest.approx(4 * 0.9479, abs=1e-3)  # E * 1 * P_0


def test_balance_loss_of_sigmoid_scores_takes_shares_that_add_up_to_one() -> None:
    """Scores 3/4, 1/2, 1/2, 1/2: expert 0, which gets all tokens, has a third of the probability."""
    router, x = router_giving(
        [math.log(3), 0.0, 0.0, 0.0], num_experts_per_tok=1, aux_loss=True, scoring_func="sigmoid"
    )
    assert router(x).aux_loss.item() == pytest.approx(4 / 3)  # E * 1 * P_0


def test_balance_loss_ignores_padding() -> None:
    """cases.md C06 (c): four padding tokens change nothing."""
    router = make_router(aux_loss=True, z_loss=True)
    x = torch.randn(8, 4)
    valid = torch.tensor([True] * 4 + [False] * 4)
    padded, plain = router(x, valid), router(x[:4])
    torch.testing.assert_close(padded.aux_loss, plain.aux_loss)
    torch.testing.assert_close(padded.z_loss, plain.z_loss)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_losses_of_few_tokens_are_finite(num_tokens: int) -> None:
    router = make_router(aux_loss=True, z_loss=True)
    routing = router(torch.randn(num_tokens, 4))
    (routing.aux_loss + routing.z_loss).backward()
    assert torch.isfinite(router.weight.grad).all()


def test_perfect_balance_gives_the_number_of_experts_per_token() -> None:
    probs = torch.full((8, 4), 0.25)
    assert balance_loss(probs, torch.full((4,), 4, dtype=torch.int32), None, 2).item() == pytest.approx(2.0)


def test_z_loss_value() -> None:
    assert z_loss(torch.zeros(3, 4), None).item() == pytest.approx(torch.tensor(4.0).log().item() ** 2)


def test_bias_moves_by_the_sign_rule_in_place() -> None:
    """cases.md C09: all tokens to expert 0, step 1e-3, three steps."""
    router = make_router(selection_bias=True)
    live = router.e_score_correction_bias
    for _ in range(3):
        update_selection_bias(live, torch.tensor([40, 0, 0, 0]), 1e-3)
    stored = router.state_dict()["e_score_correction_bias"]
    assert stored.tolist() == pytest.approx([-0.003, 0.003, 0.003, 0.003])
    assert torch.equal(stored, router.e_score_correction_bias)


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [5, 5, 5, 5], [2**40] * 4])
def test_bias_rests_when_balanced(counts: list[int]) -> None:
    bias = torch.zeros(4)
    update_selection_bias(bias, torch.tensor(counts), 1e-3)
    assert bias.tolist() == [0.0] * 4


def test_bias_update_is_exact_at_large_counts() -> None:
    """One token above the mean at 2^40 tokens: FP32 arithmetic would see no difference."""
    bias = torch.zeros(2)
    update_selection_bias(bias, torch.tensor([2**40 + 1, 2**40 - 1]), 1e-3)
    assert bias.tolist() == pytest.approx([-1e-3, 1e-3])
