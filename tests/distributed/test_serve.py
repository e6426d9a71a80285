"""A trainer of two ranks and an engine of one or two, in two processes: updates over both paths, then generation."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from distributed.harness import run_ranks
from distributed.parity import whole
from equipoise.accelerator import CPUAccelerator
from equipoise.checkpoint.tensors import checksums, model_tensors
from equipoise.distributed.agree import gather_json
from equipoise.distributed.mesh import ParallelConfig, build_meshes, derive_axes
from equipoise.distributed.weight_update import ColocatedUpdate, DistributedUpdate
from equipoise.distributed.weight_update.colocated import EMPTY
from equipoise.distributed.world import World, join_world
from equipoise.models.initialize import initialize_model
from equipoise.models.model import MoEForCausalLM
from equipoise.models.parallelize import build_parallel_model
from equipoise.serve.api import Api
from equipoise.serve.clients.reference import ReferenceClient, routes_of
from equipoise.serve.engine import EngineConfig
from equipoise.serve.http_server import Server, listen
from equipoise.serve.loop import EngineLoop
from equipoise.serve.ranks import Ranks
from equipoise.serve.regions import hf_regions, weight_source
from equipoise.serve.worker import Worker
from unit.engine_rig import AWKWARD_LENGTHS, TOY, some_ids

TOKEN = "a-token"
MODEL = TOY.model_copy(update={"num_experts": 6, "num_experts_per_tok": 2, "selection_bias": True})


@contextlib.contextmanager
def engine(world: World, num_ranks: int):
    """The engine's url, on every rank. Its ranks use a group of their own, in threads of their own."""
    group = world.groups.create("engine", range(num_ranks))
    with contextlib.ExitStack() as stack:
        url = None
        if world.rank < num_ranks:
            config = EngineConfig(max_running_requests=3, context_length=64, chunked_prefill_size=16)
            shared = group if num_ranks > 1 else None
            worker = Worker(MODEL, config, CPUAccelerator(), torch.float32, shared, deadline_s=30)
            ranks = Ranks(worker.execute, shared)
            if world.rank == 0:
                sock = stack.enter_context(listen("127.0.0.1", 0))
                loop = EngineLoop(ranks, worker, "default", 30)
                stack.enter_context(Server(loop, Api(loop, TOKEN), sock))
                url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            else:
                follower = threading.Thread(target=ranks.follow, daemon=True)
                follower.start()
                stack.callback(follower.join, 20)
        yield gather_json(url, world)[0]


def whole_checksums(model: MoEForCausalLM) -> dict[str, int]:
    """Collective."""
    tensors = whole(dict(model_tensors(model)))
    parts = {}
    for name, region in hf_regions({n: tuple(t.shape) for n, t in tensors.items()}).items():
        part = tensors[region.tensor][tuple(slice(a, a + n) for a, n in zip(region.start, region.size))]
        parts[name] = part.reshape(region.shape).contiguous()
    return dict(zip(parts, checksums(parts.values()).tolist()))


@torch.no_grad()
def change(model: MoEForCausalLM, amount: float) -> None:
    for parameter in model.parameters():
        parameter.mul_(amount)
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            buffer.add_(torch.linspace(-0.1, 0.1, buffer.numel()))


def on_rank(ep_size: int, engine_ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with join_world(CPUAccelerator(), timeout_s=40) as world:
        meshes = build_meshes(derive_axes(ParallelConfig(ep_size=ep_size), world.size, MODEL.num_experts), world)
        model = build_parallel_model(MODEL, meshes, world.device, seed=3)
        group = world.groups.create("trainer", range(world.size))
        with engine(world, engine_ranks) as url:
            client = ReferenceClient(url, TOKEN, timeout_s=40)
            for kind in (ColocatedUpdate, DistributedUpdate):
                options = {"group": lambda: group, "bucket_bytes": 5000, "deadline_s": 30}
                with kind(weight_source(model), [client], CPUAccelerator(), **options) as update:
                    for number in range(2):
                        change(model, 1.01)
                        report = update.update(f"{kind.__name__}{number}")
                    if isinstance(update, ColocatedUpdate):
                        found["empty"] = sum(EMPTY in row for row in update._steps)
                    else:
                        found["senders"] = len(update._senders)
                wanted = whole_checksums(model)
                if world.rank == 0:
                    got = client.checksums()
                    found[kind.__name__] = sorted(n for n in wanted.keys() | got.keys() if wanted.get(n) != got.get(n))
                    found["version"] = client.weight_version()
                    found["bytes"] = report.num_bytes
            answers: list[Any] = []
            if world.rank == 0:
                with ThreadPoolExecutor(8) as pool:
                    answers = list(pool.map(lambda n: ask(client, n), AWKWARD_LENGTHS))
            answers = gather_json(answers, world)[0]
            found["logprobs"] = compare(model, answers)
    return found


def ask(client: ReferenceClient, length: int) -> list[Any]:
    params = {"temperature": 0.8, "sampling_seed": length, "max_new_tokens": 6}
    options = {"return_logprob": True, "logprob_start_len": 0, "return_routed_experts": True}
    ids = some_ids(length)
    answer = client.generate(ids, sampling_params=params, **options)
    meta = answer["meta_info"]
    ids += answer["output_ids"]
    logprobs = meta["input_token_logprobs"] + [entry[0] for entry in meta["output_token_logprobs"]]
    return [ids, logprobs, routes_of(answer, len(ids)).tolist()]


@torch.no_grad()
def compare(model: MoEForCausalLM, answers: list[Any]) -> list[tuple[float, bool]]:
    """Largest difference of log-probabilities and whether all routes agree. Collective."""
    found = []
    for ids, logprobs, routes in answers:
        output = model(torch.tensor([ids]))
        wanted = (output.logits[0] / 0.8).log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        live = torch.stack([r.ids_TK for r in output.routings], dim=1)[:-1]
        found.append((float((wanted - torch.tensor(logprobs)).abs().max()), live.tolist() == routes))
    return found


@pytest.mark.parametrize(("ep_size", "engine_ranks"), [(2, 2), (1, 2), (2, 1)])
def test_sharded_trainers_update_engines_and_both_compute_the_same(ep_size: int, engine_ranks: int) -> None:
    found, _ = run_ranks(on_rank, 2, ep_size, engine_ranks, deadline_s=120)
    assert found["ColocatedUpdate"] == []
    assert found["DistributedUpdate"] == []
    assert found["version"] == "DistributedUpdate1"
    assert len(found["logprobs"]) == len(AWKWARD_LENGTHS)
    for difference, same_routes in found["logprobs"]:
        assert difference <= 1e-5
        assert same_routes
    assert found["senders"] == 2


def test_a_plain_model_is_what_the_tests_compare_with() -> None:
    model = MoEForCausalLM(MODEL)
    initialize_model(model, 3)
    assert len(whole_checksums(model)) == len(model_tensors(model)) - 4 + 2 * MODEL.num_experts * 3
