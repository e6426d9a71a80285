"""Generation: what the engine computes is what the trainer computes, whatever shares its batch."""

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from equipoise.errors import ConfigError
from equipoise.models.config import ModelConfig
from equipoise.models.model import MoEForCausalLM
from equipoise.serve.engine import routes_dtype
from equipoise.serve.model import moe_layers
from equipoise.serve.request import Finished
from unit.engine_rig import (
    AWKWARD_LENGTHS,
    TOY,
    VOCAB,
    engine_of,
    finish,
    generate,
    prompt,
    routes_of,
    some_ids,
    trainer_logprobs,
    trainer_model,
)
from unit.test_hf_parity import hf_model


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("chunk", [5, 512])
def test_logprobs_and_routes_are_the_trainers(slots: int, chunk: int) -> None:
    model = trainer_model()
    engine = engine_of(model, max_running_requests=slots, chunked_prefill_size=chunk)
    prompts = [prompt(some_ids(n), f"{n}", max_new_tokens=1 + n % 9, seed=n) for n in AWKWARD_LENGTHS]
    results = generate(engine, *prompts)
    for one in prompts:
        result = results[one.rid]
        ids = one.ids + result.output_ids
        expected = trainer_logprobs(model, ids, 0.7)
        assert len(result.output_ids) == one.max_new_tokens
        assert result.input_logprobs + result.output_logprobs == pytest.approx(expected, abs=1e-5)
        with torch.no_grad():
            routings = model(torch.tensor([ids])).routings
        live = torch.stack([r.ids_TK for r in routings], dim=1)[:-1].numpy()
        assert routes_of(result).dtype == np.uint8
        np.testing.assert_array_equal(routes_of(result), live)


def test_latent_attention_and_its_router_as_well() -> None:
    """DeepSeek-V3's parts: other features of keys than of values, sigmoid scores, groups, shared experts, biases."""
    latent = {
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
    }
    router = {"scoring_func": "sigmoid", "selection_bias": True, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    model = trainer_model(TOY.model_copy(update=latent | router | {"num_nextn_predict_layers": 1}))
    for layer in moe_layers(model):
        layer.gate.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.2, TOY.num_experts))
    prompts = [prompt(some_ids(n), f"{n}") for n in (1, 7, 17)]
    results = generate(engine_of(model, chunked_prefill_size=6), *prompts)
    for one in prompts:
        result = results[one.rid]
        expected = trainer_logprobs(model, one.ids + result.output_ids, 0.7)
        assert result.input_logprobs + result.output_logprobs == pytest.approx(expected, abs=1e-5)


def test_a_request_draws_the_same_tokens_alone_and_in_any_batch() -> None:
    model, one = trainer_model(), prompt(some_ids(9), "one", seed=77)
    alone = generate(engine_of(model), one)["one"]
    crowd = [prompt(some_ids(n, 1), f"{n}") for n in AWKWARD_LENGTHS]
    mixed = generate(engine_of(model, chunked_prefill_size=7), *crowd[:3], one, *crowd[3:])["one"]
    assert mixed.output_ids == alone.output_ids
    other = generate(engine_of(model), one.model_copy(update={"seed": 78, "max_new_tokens": 20}))["one"]
    assert other.output_ids[:5] != alone.output_ids


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"norm_topk_prob": True, "mlp_only_layers": [1]}]
)
def test_greedy_equals_transformers(changes: dict) -> None:
    theirs: Qwen3MoeForCausalLM = hf_model(**changes).eval()
    ours = MoEForCausalLM(ModelConfig.from_hf(theirs.config.to_dict()))
    ours.load_state_dict(theirs.state_dict())
    engine = engine_of(ours)
    for length in (1, 23):
        ids = some_ids(length)
        with torch.no_grad():
            expected = theirs.generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=8, eos_token_id=None, pad_token_id=0
            )
        result = generate(engine, prompt(ids, max_new_tokens=8, temperature=0.0))["r"]
        assert ids + result.output_ids == expected[0].tolist()


def test_an_equal_beginning_is_computed_once_and_changes_nothing() -> None:
    model, start = trainer_model(), some_ids(20)
    engine = engine_of(model)
    first = generate(engine, prompt(start, logprob_start=20))["r"]
    again = generate(engine, prompt([*start, 3, 4], logprob_start=22))["r"]
    assert (first.cached_tokens, again.cached_tokens) == (0, 20)
    fresh = generate(engine_of(model, prefix_reuse=False), prompt([*start, 3, 4], logprob_start=22))["r"]
    assert again.output_ids == fresh.output_ids
    assert again.output_logprobs == pytest.approx(fresh.output_logprobs, abs=1e-5)
    np.testing.assert_array_equal(routes_of(again), routes_of(fresh))
    engine.flush()
    assert generate(engine, prompt([*start, 3, 4]))["r"].cached_tokens == 0


def test_nothing_computed_under_other_weights_is_used_again() -> None:
    old, new = trainer_model(seed=0), trainer_model(seed=1)
    engine, ids = engine_of(old), some_ids(12)
    generate(engine, prompt(ids, logprob_start=12))
    engine.add(prompt(ids, "running", max_new_tokens=6, logprob_start=12))
    engine.step()
    engine.model.load_state_dict(new.state_dict())
    engine.set_version("1")
    running = finish(engine)["running"]
    assert running.versions == [("default", 1), ("1", 5)]
    expected = trainer_logprobs(new, ids + running.output_ids, 0.7)[len(ids) :]
    assert running.output_logprobs[1:] == pytest.approx(expected, abs=1e-5)
    after = generate(engine, prompt(ids, logprob_start=12))["r"]
    fresh = generate(engine_of(new), prompt(ids, logprob_start=12))["r"]
    assert after.cached_tokens == 0
    assert after.output_ids == fresh.output_ids
    assert after.output_logprobs == pytest.approx(fresh.output_logprobs, abs=1e-6)


def test_retracted_requests_go_on_as_if_nothing_happened() -> None:
    model = trainer_model()
    prompts = [prompt(some_ids(n), f"{n}", max_new_tokens=8) for n in (3, 9, 11, 5)]
    expected = generate(engine_of(model), *prompts)
    engine = engine_of(model)
    for one in prompts:
        engine.add(one)
    done: dict[str, Finished] = {}
    for _ in range(3):
        done |= {f.rid: f for f in engine.step()}
    engine.retract()
    assert (engine.num_running, engine.num_waiting) == (0, 4)
    done |= finish(engine)
    assert {rid: f.output_ids for rid, f in done.items()} == {rid: f.output_ids for rid, f in expected.items()}
    for rid, result in done.items():
        np.testing.assert_array_equal(routes_of(result), routes_of(expected[rid]))


def test_aborted_requests_return_what_they_have() -> None:
    engine = engine_of(trainer_model(), max_running_requests=1)
    engine.add(prompt(some_ids(4), "running", max_new_tokens=20))
    engine.add(prompt(some_ids(5), "waiting"))
    engine.step()
    engine.step()
    results = {f.rid: f for f in engine.abort({"running", "unknown"})}
    assert set(results) == {"running"}
    assert len(results["running"].output_ids) == 2
    assert results["running"].finish["type"] == "abort"
    assert finish(engine)["waiting"].finish["type"] == "length"
    assert engine.abort() == []


def test_where_a_text_ends() -> None:
    engine, ids = engine_of(trainer_model()), some_ids(6)
    free = generate(engine, prompt(ids, max_new_tokens=12))["r"].output_ids
    stop = free[3]
    first = free.index(stop)
    stopped = generate(engine, prompt(ids, max_new_tokens=12, stop_ids=[stop]))["r"]
    assert stopped.output_ids == free[: first + 1]
    assert stopped.finish == {"type": "stop", "matched": stop}
    longer = generate(engine, prompt(ids, max_new_tokens=12, stop_ids=[stop], min_new_tokens=12))["r"]
    assert stop not in longer.output_ids
    assert len(longer.output_ids) == 12
    nothing = generate(engine, prompt(ids, max_new_tokens=0))["r"]
    assert (nothing.output_ids, nothing.routes_shape) == ([], [5, 2, 2])


def test_rows_of_routes_are_the_tokens_but_the_last_from_the_start_asked_for() -> None:
    engine, ids = engine_of(trainer_model()), some_ids(9)
    whole = routes_of(generate(engine, prompt(ids, max_new_tokens=4))["r"])
    part = routes_of(generate(engine, prompt(ids, max_new_tokens=4, routes_start=7))["r"])
    assert whole.shape == (12, 2, 2)
    np.testing.assert_array_equal(part, whole[7:])
    assert generate(engine, prompt(ids, routes=False))["r"].routes is None


@pytest.mark.parametrize(("num_experts", "dtype"), [(1, "uint8"), (256, "uint8"), (257, "int16"), (40000, "int32")])
def test_routes_take_the_smallest_dtype(num_experts: int, dtype: str) -> None:
    assert routes_dtype(num_experts).name == dtype


def test_draws_follow_the_probabilities_and_the_limits() -> None:
    model, ids = trainer_model(), some_ids(5)
    engine = engine_of(model, max_running_requests=16)
    with torch.no_grad():
        probs = (model(torch.tensor([ids])).logits[0, -1] / 0.7).softmax(-1)
    best = probs.argsort(descending=True)[:2].tolist()
    settings = {"max_new_tokens": 1, "logprobs": False, "routes": False}
    drawn = generate(engine, *(prompt(ids, f"{n}", seed=n, **settings) for n in range(400)))
    share = sum(f.output_ids == [best[0]] for f in drawn.values()) / 400
    assert share == pytest.approx(float(probs[best[0]]), abs=0.08)
    two = generate(engine, *(prompt(ids, f"{n}", seed=n, top_k=2, **settings) for n in range(40)))
    assert {f.output_ids[0] for f in two.values()} == set(best)
    one = generate(engine, *(prompt(ids, f"{n}", seed=n, top_p=1e-9, **settings) for n in range(10)))
    assert {f.output_ids[0] for f in one.values()} == {best[0]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": [0, VOCAB]}, "expected token ids from 0 to 60"),
        ({"ids": [-1]}, "expected token ids from 0 to 60"),
        ({"ids": [1] * 60}, "more than the context of 64"),
        ({"routes_start": 3}, "not below the prompt's 3 tokens"),
    ],
)
def test_impossible_requests_are_refused(changes: dict, message: str) -> None:
    engine = engine_of(trainer_model())
    with pytest.raises(ConfigError, match=message):
        engine.add(prompt(**({"ids": [1, 2, 3]} | changes)))
