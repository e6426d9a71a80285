"""An engine behind its HTTP API in a thread of this process, and a trainer that updates it."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from equipoise.accelerator import CPUAccelerator
from equipoise.checkpoint.tensors import checksums
from equipoise.distributed.weight_update import ColocatedUpdate, DistributedUpdate
from equipoise.models.config import ModelConfig
from equipoise.models.model import MoEForCausalLM
from equipoise.serve.api import Api
from equipoise.serve.clients.reference import ReferenceClient
from equipoise.serve.engine import EngineConfig
from equipoise.serve.http_server import Server, listen
from equipoise.serve.loop import EngineLoop
from equipoise.serve.ranks import Ranks
from equipoise.serve.regions import hf_regions, weight_source
from equipoise.serve.worker import Worker
from unit.engine_rig import TOY

TOKEN = "a-token"
PATHS = {"colocated": ColocatedUpdate, "distributed": DistributedUpdate}


class Served(NamedTuple):
    """What a test reaches behind the API."""

    url: str
    worker: Worker
    loop: EngineLoop


@contextlib.contextmanager
def serving(model: ModelConfig = TOY, deadline_s: float = 20.0, **api) -> Iterator[Served]:
    """A server whose weights have still to come."""
    config = EngineConfig(max_running_requests=3, context_length=64, chunked_prefill_size=16)
    worker = Worker(model, config, CPUAccelerator(), torch.float32, deadline_s=deadline_s)
    with listen("127.0.0.1", 0) as sock:
        loop = EngineLoop(Ranks(worker.execute), worker, worker.engine.version, deadline_s)
        with Server(loop, Api(loop, TOKEN, **api), sock):
            yield Served(f"http://127.0.0.1:{sock.getsockname()[1]}", worker, loop)


def client_of(server: Served, **options) -> ReferenceClient:
    return ReferenceClient(server.url, TOKEN, **({"timeout_s": 30.0} | options))


def updater(path: str, model: MoEForCausalLM, *servers: Served, bucket_bytes: int = 4096, **options):
    """One of the two update paths from a trainer's model to engines."""
    clients = [client_of(server) for server in servers]
    settings = {"bucket_bytes": bucket_bytes, "deadline_s": 20.0}
    return PATHS[path](weight_source(model), clients, CPUAccelerator(), **(settings | options))


def trainer_checksums(model: MoEForCausalLM) -> dict[str, int]:
    """Of every tensor by its name in a checkpoint."""
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    found = {}
    for name, region in hf_regions({n: tuple(t.shape) for n, t in tensors.items()}).items():
        part = tensors[region.tensor][tuple(slice(a, a + n) for a, n in zip(region.start, region.size))]
        found[name] = part.reshape(region.shape).contiguous()
    return dict(zip(found, checksums(found.values()).tolist()))
