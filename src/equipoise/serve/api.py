"""The engine's HTTP API: SGLang's routes that RL frameworks use, and begin / commit / abandon around weight updates.

Everything is JSON and nothing is ever unpickled. Routes that change the engine need the admin token as a bearer token.
What cannot be done as things are is answered with 409, what may be tried again later with 503, what is malformed with
400, each with `{"success": false, "error": {"message": ...}}`.
"""

import asyncio
import hmac
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from equipoise.config import Config
from equipoise.errors import ConfigError, WeightUpdateError
from equipoise.serve.engine import check_prompt
from equipoise.serve.loop import EngineLoop, PauseMode, Unavailable
from equipoise.serve.ranks import RanksError, Refused
from equipoise.serve.request import MAX_SEED, Finished, GenerateRequest, Prompt
from equipoise.serve.worker import TAGS

logger = logging.getLogger(__name__)

RETRY_AFTER_S = "1"
PICKLED = (
    "serialized_named_tensors holds pickled data, which this engine never unpickles: send `handles`, plain JSON, "
    "between begin_weight_update and commit_weight_update"
)

Name = Annotated[str, Field(min_length=1, max_length=200)]
Handler = Callable[[Any], Awaitable[Any]]


class Empty(Config):
    """No fields."""


class Pause(Config):
    """Body of `POST /pause_generation`."""

    mode: PauseMode = "abort"


class AbortRequest(Config):
    """Body of `POST /abort_request`."""

    rid: str = ""
    abort_all: bool = False


class InitGroup(Config):
    """Body of `POST /init_weights_update_group`."""

    master_address: Name
    master_port: int = Field(ge=1, le=65535)
    rank_offset: NonNegativeInt
    world_size: PositiveInt
    group_name: Name = "weight_update_group"
    backend: Name = "nccl"


class DestroyGroup(Config):
    """Body of `POST /destroy_weights_update_group`."""

    group_name: Name = "weight_update_group"


class Begin(Config):
    """Body of `POST /begin_weight_update`: a manifest, or the version and digest of one that was sent before.
    `take_over` gives up an update that another trainer has left open."""

    update_id: Name
    manifest: dict[str, Any] | None = None
    version: Name | None = None
    digest: Name | None = None
    take_over: bool = False


class FromDistributed(Config):
    """Body of `POST /update_weights_from_distributed`, between begin and commit: the manifest's buckets with these
    numbers are broadcast in this order."""

    update_id: Name
    group_name: Name = "weight_update_group"
    buckets: list[NonNegativeInt]


class FromTensor(Config):
    """Body of `POST /update_weights_from_tensor`, between begin and commit: for each engine rank what a trainer of this
    machine offers (see `Offer`)."""

    update_id: Name
    handles: list[dict[str, Any]]


class Commit(Config):
    """Body of `POST /commit_weight_update`. `checksums`: [bucket, checksum] of every bucket."""

    update_id: Name
    checksums: list[tuple[NonNegativeInt, int]]


class Abandon(Config):
    """Body of `POST /abandon_weight_update`."""

    update_id: Name
    reason: str = Field("the trainer gave it up", max_length=2000)


class FromDisk(Config):
    """Body of `POST /update_weights_from_disk`: a folder of safetensors."""

    model_path: Name
    weight_version: Name | None = None
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class Tags(Config):
    """Body of the two memory routes; no tags: all."""

    tags: list[Literal["weights", "kv_cache"]] | None = None


class Version(Config):
    """Body of `POST /update_weight_version`."""

    new_version: Name
    abort_all_requests: bool = False


class Check(Config):
    """Body of `POST /weights_checker`."""

    action: Literal["snapshot", "reset_tensors", "compare", "checksum"]


class RouteSpec(NamedTuple):
    """One route: its body, what it does, whether it needs the admin token, whether it ends when its client is gone."""

    body: type[Config]
    act: Handler
    admin: bool = False
    ends_with_client: bool = False


class Reply(NamedTuple):
    """An answer: HTTP status, JSON body, headers."""

    status: int
    body: Any
    headers: dict[str, str] | None = None


class Api:
    """Handlers over one loop. `model_path` is what info routes show; `tokenizer` has `encode` and `decode`."""

    def __init__(
        self, loop: EngineLoop, admin_token: str, model_path: str = "", tokenizer: Any = None, eos_ids: Any = ()
    ) -> None:
        self.loop, self.admin_token, self.model_path = loop, admin_token, model_path
        self.tokenizer, self.eos_ids = tokenizer, list(eos_ids)
        self.model = loop.worker.model.config
        self.config = loop.worker.engine.config

    @property
    def routes(self) -> dict[tuple[str, str], "RouteSpec"]:
        """What is answered, by method and path."""
        get = {
            "health": RouteSpec(Empty, self.health),
            "health_generate": RouteSpec(Empty, self.health_generate),
            "model_info": RouteSpec(Empty, self.model_info),
            "get_model_info": RouteSpec(Empty, self.model_info),
            "server_info": RouteSpec(Empty, self.server_info),
            "get_server_info": RouteSpec(Empty, self.server_info),
            "get_weight_version": RouteSpec(Empty, self.weight_version),
            "v1/loads": RouteSpec(Empty, self.loads),
            "flush_cache": RouteSpec(Empty, self.flush_cache, True),
            "get_weights_info": RouteSpec(Empty, self.weights_info, True),
        }
        post = {
            "generate": RouteSpec(GenerateRequest, self.generate, ends_with_client=True),
            "flush_cache": RouteSpec(Empty, self.flush_cache, True),
            "pause_generation": RouteSpec(Pause, self.pause, True),
            "continue_generation": RouteSpec(Empty, self.resume, True),
            "abort_request": RouteSpec(AbortRequest, self.abort, True),
            "init_weights_update_group": RouteSpec(InitGroup, self.init_group, True),
            "destroy_weights_update_group": RouteSpec(DestroyGroup, self.destroy_group, True),
            "begin_weight_update": RouteSpec(Begin, self.begin, True),
            "update_weights_from_distributed": RouteSpec(FromDistributed, self.from_distributed, True),
            "update_weights_from_tensor": RouteSpec(FromTensor, self.from_tensor, True),
            "commit_weight_update": RouteSpec(Commit, self.commit, True),
            "abandon_weight_update": RouteSpec(Abandon, self.abandon, True),
            "update_weights_from_disk": RouteSpec(FromDisk, self.from_disk, True),
            "release_memory_occupation": RouteSpec(Tags, self.release, True),
            "resume_memory_occupation": RouteSpec(Tags, self.take_back, True),
            "update_weight_version": RouteSpec(Version, self.set_version, True),
            "weights_checker": RouteSpec(Check, self.check, True),
        }
        both = {("GET", f"/{path}"): spec for path, spec in get.items()}
        return both | {("POST", f"/{path}"): spec for path, spec in post.items()}

    async def answer(self, spec: "RouteSpec", authorization: str, body: bytes) -> "Reply":
        """Never raises: every error is a reply."""
        try:
            if spec.admin:
                self._check_token(authorization)
            value = _parse(body)
            if "serialized_named_tensors" in value:
                raise _Malformed(PICKLED)
            return Reply(200, await spec.act(spec.body.model_validate(value)))
        except _Denied as error:
            return _error(401, str(error), {"WWW-Authenticate": "Bearer"})
        except ValidationError as error:
            return _error(400, _describe(error))
        except (_Malformed, ConfigError) as error:
            return _error(400, str(error))
        except Unavailable as error:
            return _error(503, str(error), {"Retry-After": RETRY_AFTER_S})
        except (Refused, RanksError, WeightUpdateError) as error:
            return _error(409, str(error))
        except Exception as error:
            logger.exception("a request has failed")
            return _error(500, f"internal error: {type(error).__name__}")

    def _check_token(self, authorization: str) -> None:
        if not hmac.compare_digest(authorization.encode(), f"Bearer {self.admin_token}".encode()):
            raise _Denied("this route needs the admin token: Authorization: Bearer <token>")

    async def _call(self, act: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self.loop.call(act))

    # Health and information

    async def health(self, _: Empty) -> Any:
        """Whether the engine can do anything; also while it is paused."""
        if not self.loop.is_alive:
            raise Unavailable(f"the engine has failed: {self.loop.failure}")
        return {"status": "ok"}

    async def health_generate(self, _: Empty) -> Any:
        """Whether the engine generates."""
        await self.health(_)
        self.loop.check_available()
        return {"status": "ok"}

    async def model_info(self, _: Empty) -> Any:
        return {
            "model_path": self.model_path,
            "is_generation": True,
            "weight_version": self.loop.version,
            "num_experts": self.model.num_experts,
            "num_moe_layers": len([i for i in self.model.moe_layers if i < self.model.num_hidden_layers]),
            "num_experts_per_tok": self.model.num_experts_per_tok,
            "vocab_size": self.model.vocab_size,
        }

    async def server_info(self, _: Empty) -> Any:
        loop = self.loop
        memory = await self._call(loop.memory)
        return {
            "version": "equipoise",
            "ep_size": loop.ranks.size,
            "tp_size": loop.ranks.size,
            "weight_version": loop.version,
            "is_paused": loop.is_paused,
            "dirty": loop.dirty,
            "released": sorted(loop.released),
            "num_updates": loop.num_updates,
            "memory": memory,
            **self.config.model_dump(),
        }

    async def weight_version(self, _: Empty) -> Any:
        return {"weight_version": self.loop.version}

    async def loads(self, _: Empty) -> Any:
        loads = await self._call(self.loop.loads)
        return {"loads": [{"rank": rank, **load} for rank, load in enumerate(loads)]}

    async def weights_info(self, _: Empty) -> Any:
        """Every tensor that an update has to bring, and which experts each rank holds."""
        worker = self.loop.worker
        count = worker.num_local_experts
        return {
            "num_ranks": worker.num_ranks,
            "weight_version": self.loop.version,
            "tensors": worker.receiver.specs,
            "experts": [[rank * count, count] for rank in range(worker.num_ranks)],
        }

    # Generation

    async def generate(self, body: GenerateRequest) -> Any:
        prompt = self._prompt(body)
        check_prompt(prompt, self.model.vocab_size, self.config.context_length)
        try:
            finished = await self._call(lambda: self.loop.generate(prompt))
        except asyncio.CancelledError:  # nobody waits for it any more
            self.loop.call(lambda: self.loop.withdraw(prompt))
            raise
        return self._answer(finished, body)

    def _prompt(self, body: GenerateRequest) -> Prompt:
        params, ids = body.sampling_params, body.input_ids
        if ids is None:
            ids = self._tokenizer("text").encode(body.text).tolist()
        if not ids:
            raise ConfigError("the prompt is empty: give at least one token")
        context = self.config.context_length
        stop_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.eos_ids)}
        bad = [id_ for id_ in stop_ids if not 0 <= id_ < self.model.vocab_size]
        if bad:
            raise ConfigError(f"stop_token_ids has {bad[0]}: expected ids from 0 to {self.model.vocab_size - 1}")
        room, max_new_tokens = max(0, context - len(ids)), params.max_new_tokens
        if max_new_tokens is None:
            max_new_tokens = room
        elif "max_new_tokens" not in params.model_fields_set:
            max_new_tokens = min(max_new_tokens, room)
        return Prompt(
            rid=body.rid or secrets.token_hex(16),
            ids=ids,
            max_new_tokens=max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_new_tokens=params.min_new_tokens,
            stop_ids=sorted(stop_ids),
            seed=secrets.randbelow(MAX_SEED) if params.sampling_seed is None else params.sampling_seed,
            logprobs=body.return_logprob,
            logprob_start=len(ids) if body.logprob_start_len < 0 else body.logprob_start_len,
            routes=body.return_routed_experts,
            routes_start=body.routed_experts_start_len,
        )

    def _tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise ConfigError(f"this engine has no tokenizer for {what}: send input_ids, or start it with --tokenizer")
        return self.tokenizer

    def _answer(self, finished: Finished, body: GenerateRequest) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": finished.rid,
            "finish_reason": finished.finish,
            "prompt_tokens": finished.prompt_tokens,
            "completion_tokens": len(finished.output_ids),
            "cached_tokens": finished.cached_tokens,
            "weight_version": finished.version,
            "weight_versions": finished.versions,
        }
        if body.return_logprob:
            meta["output_token_logprobs"] = [
                [x, i, None] for x, i in zip(finished.output_logprobs, finished.output_ids)
            ]
            if body.logprob_start_len >= 0:
                meta["input_token_logprobs"] = finished.input_logprobs
        if finished.routes is not None:
            meta["routed_experts"] = finished.routes
            meta["routed_experts_dtype"] = finished.routes_dtype
            meta["routed_experts_shape"] = finished.routes_shape
        text = ""
        if self.tokenizer is not None:
            text = self.tokenizer.decode(finished.output_ids)
        return {"text": text, "output_ids": finished.output_ids, "meta_info": meta}

    async def pause(self, body: Pause) -> Any:
        await self._call(lambda: self.loop.pause(body.mode))
        return _ok("generation is paused")

    async def resume(self, _: Empty) -> Any:
        await self._call(self.loop.resume)
        return _ok("generation goes on")

    async def abort(self, body: AbortRequest) -> Any:
        if not body.abort_all and not body.rid:
            raise ConfigError("give a rid, or abort_all")
        count = await self._call(lambda: self.loop.abort(None if body.abort_all else body.rid))
        return _ok(f"{count} requests ended")

    async def flush_cache(self, _: Empty) -> Any:
        await self._call(self.loop.flush)
        return _ok("kept keys and values are forgotten")

    # Weight updates

    async def init_group(self, body: InitGroup) -> Any:
        if body.rank_offset + self.loop.ranks.size > body.world_size:
            raise ConfigError(
                f"rank_offset {body.rank_offset} and {self.loop.ranks.size} engine ranks are more than world_size "
                f"{body.world_size}"
            )
        await self._call(
            lambda: self.loop.join_group(
                address=body.master_address,
                port=body.master_port,
                offset=body.rank_offset,
                size=body.world_size,
                name=body.group_name,
                backend=body.backend,
            )
        )
        return _ok(f"joined {body.group_name!r}")

    async def destroy_group(self, body: DestroyGroup) -> Any:
        found = await self._call(lambda: self.loop.leave_group(body.group_name))
        return _ok(f"left {body.group_name!r}" if found else f"there was no group {body.group_name!r}")

    async def begin(self, body: Begin) -> Any:
        if body.manifest is None and (body.version is None or body.digest is None):
            raise ConfigError("give a manifest, or the version and digest of one that was sent before")
        version, digest = body.version or "", body.digest or ""
        await self._call(lambda: self.loop.begin(body.update_id, version, digest, body.manifest, body.take_over))
        return _ok("send the buckets, then commit")

    async def from_distributed(self, body: FromDistributed) -> Any:
        seconds = await self._call(lambda: self.loop.receive(body.update_id, body.group_name, body.buckets))
        return _ok(f"{len(body.buckets)} buckets are in place") | {"seconds": seconds}

    async def from_tensor(self, body: FromTensor) -> Any:
        seconds = await self._call(lambda: self.loop.load(body.update_id, body.handles))
        return _ok("the buckets are in place") | {"seconds": seconds}

    async def commit(self, body: Commit) -> Any:
        sums = [list(pair) for pair in body.checksums]
        version = await self._call(lambda: self.loop.commit(body.update_id, sums))
        return _ok(f"the weights are version {version!r}") | {"weight_version": version}

    async def abandon(self, body: Abandon) -> Any:
        await self._call(lambda: self.loop.abandon(body.update_id, body.reason))
        return _ok("the update is given up") | {"dirty": self.loop.dirty}

    async def from_disk(self, body: FromDisk) -> Any:
        if body.abort_all_requests:
            await self._call(lambda: self.loop.abort(None))
        version = body.weight_version or self.loop.version
        await self._call(lambda: self.loop.load_disk(body.model_path, version))
        return _ok(f"the weights are version {version!r}") | {"num_paused_requests": self.loop.num_requests}

    async def release(self, body: Tags) -> Any:
        await self._call(lambda: self.loop.release(list(body.tags or TAGS)))
        return _ok("memory is released")

    async def take_back(self, body: Tags) -> Any:
        await self._call(lambda: self.loop.take_back(list(body.tags or TAGS)))
        return _ok("memory is there")

    async def set_version(self, body: Version) -> Any:
        await self._call(lambda: self.loop.set_version(body.new_version))
        return _ok(f"the weights are called {body.new_version!r}")

    async def check(self, body: Check) -> Any:
        found = await self._call(lambda: self.loop.check_weights(body.action))
        return _ok(body.action) | ({"checksums": found} if body.action == "checksum" else {})


class _Malformed(Exception):  # noqa: N818
    """Answered with 400."""


class _Denied(Exception):  # noqa: N818
    """Answered with 401."""


def _parse(data: bytes) -> dict[str, Any]:
    if not data.strip():
        return {}
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _Malformed(f"the body is {type(value).__name__}: expected a JSON object")
    return value


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def _describe(error: ValidationError) -> str:
    """All problems of a body in one line."""
    parts = []
    for problem in error.errors(include_url=False, include_input=False)[:5]:
        where = ".".join(map(str, problem["loc"]))
        parts.append(f"{where}: {problem['msg']}" if where else problem["msg"])
    return "; ".join(parts)


def _ok(message: str) -> dict[str, Any]:
    return {"success": True, "message": message}


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Reply:
    """Both where SGLang's clients look (`message`) and where OpenAI's do (`error.message`)."""
    return Reply(status, {"success": False, "message": message, "error": {"message": message}}, headers)
