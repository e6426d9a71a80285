"""An engine over a toy model, and the trainer's view of the same weights."""

import base64

import numpy as np
import torch

from equipoise.models.config import ModelConfig
from equipoise.models.initialize import initialize_model
from equipoise.models.model import MoEForCausalLM
from equipoise.serve.engine import Engine, EngineConfig
from equipoise.serve.model import build_engine_model
from equipoise.serve.request import Finished, Prompt

VOCAB = 61
TOY = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_experts=6,
    num_experts_per_tok=2,
    mlp_only_layers=(1,),
    initializer_range=0.3,
)
AWKWARD_LENGTHS = (1, 2, 7, 16, 17, 33)


def trainer_model(config: ModelConfig = TOY, seed: int = 0) -> MoEForCausalLM:
    model = MoEForCausalLM(config)
    initialize_model(model, seed)
    return model.eval()


def engine_of(model: MoEForCausalLM, **settings) -> Engine:
    copy = build_engine_model(model.config, torch.device("cpu"), torch.float32)
    copy.load_state_dict(model.state_dict())
    defaults = {"max_running_requests": 3, "context_length": 64, "chunked_prefill_size": 16}
    return Engine(copy, EngineConfig(**(defaults | settings)))


def prompt(ids, rid: str = "r", **changes) -> Prompt:
    values = {
        "rid": rid,
        "ids": list(ids),
        "max_new_tokens": 5,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "min_new_tokens": 0,
        "stop_ids": [],
        "seed": 1,
        "logprobs": True,
        "logprob_start": 0,
        "routes": True,
        "routes_start": 0,
    }
    return Prompt(**(values | changes))


def some_ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(100 * seed + length)).tolist()


def finish(engine: Engine) -> dict[str, Finished]:
    """Steps until nothing is left."""
    done = {}
    for _ in range(1000):
        done |= {f.rid: f for f in engine.step()}
        if not engine.num_running and not engine.num_waiting:
            return done
    raise AssertionError("requests never ended")


def generate(engine: Engine, *prompts: Prompt) -> dict[str, Finished]:
    for one in prompts:
        engine.add(one)
    return finish(engine)


def routes_of(result: Finished) -> np.ndarray:
    raw = base64.b64decode(result.routes)
    return np.frombuffer(raw, dtype=result.routes_dtype).reshape(result.routes_shape)


@torch.no_grad()
def trainer_logprobs(model: MoEForCausalLM, ids: list[int], temperature: float) -> list[float]:
    """Of each token but the first, by one forward over the whole text."""
    log_probs = (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
    return log_probs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
