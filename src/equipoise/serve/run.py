"""An engine process: joins its world, loads the model, serves until it is told to stop."""

import contextlib
import logging
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

from equipoise.accelerator import Accelerator, get_accelerator
from equipoise.checkpoint.hf import open_source
from equipoise.config import Config
from equipoise.data.tokenizer import load_tokenizer
from equipoise.distributed.world import World, join_world
from equipoise.errors import ConfigError, EquipoiseError
from equipoise.models.config import ModelConfig
from equipoise.serve.api import Api
from equipoise.serve.disk import eos_ids_of
from equipoise.serve.engine import EngineConfig
from equipoise.serve.http_server import Server, listen
from equipoise.serve.loop import EngineLoop
from equipoise.serve.ranks import Ranks
from equipoise.serve.worker import Worker

logger = logging.getLogger(__name__)

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]


class EngineFailed(EquipoiseError):  # noqa: N818 - as RankFailure
    """The engine cannot go on; what it was doing is lost."""


LOCAL = ("127.0.0.1", "localhost", "::1")


class ServeConfig(Config):
    """What `equipoise serve` takes."""

    model: Path
    """Folder with config.json and safetensors, a run folder, or a checkpoint of a run."""
    host: str = "127.0.0.1"
    """Address that is listened on."""
    port: int = Field(30000, ge=0, le=65535)
    """Port that is listened on; 0: a free one."""
    dtype: DTypeName = "auto"
    """Of the weights; auto: float32 on CPU, else bfloat16."""
    load_weights: bool = True
    """False: only the configuration is read, the weights come with the first update."""
    admin_token_file: Path | None = None
    """File with the token for admin routes; None: a new token, in a file that only this user can read."""
    tokenizer: str | None = None
    """For `text`: bytes, a tokenizer.json or its folder; None: token ids only."""
    timeout_s: float = Field(300.0, gt=0)
    """Longest time without progress of an update, and of a collective between the engine's processes."""
    engine: EngineConfig = EngineConfig()
    """Sizes of each process."""


def read_admin_token(path: Path | None) -> tuple[str, Path | None]:
    """The token, and the new file that holds it if one was made.

    Raises:
        ConfigError: the file is not there, empty, or others can read it; or a new one cannot be written.
    """
    if path is None:
        token = secrets.token_urlsafe(32)
        folder = os.environ.get("XDG_RUNTIME_DIR") or None
        if folder is not None and not os.access(folder, os.W_OK):  # another user's shell has left it set
            folder = None
        # A name of its own: in a container, a killed engine's file has the process id of the next one.
        made: Path | None = None
        try:
            number, name = tempfile.mkstemp(".token", f"equipoise-admin-{os.getpid()}-", folder)  # for this user alone
            made = Path(name)
            with os.fdopen(number, "w") as file:
                file.write(token)
        except OSError as error:
            if made is not None:
                made.unlink()
            raise ConfigError(
                f"the admin token cannot be written into {folder or tempfile.gettempdir()}: {error.strerror}; give "
                "--admin-token-file, or another TMPDIR"
            ) from None
        return token, made
    try:
        token, mode = path.read_text().strip(), path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"--admin-token-file {path}: {error.strerror}") from None
    if not token:
        raise ConfigError(f"--admin-token-file {path} is empty: put a long random text into it")
    if mode & 0o077:
        raise ConfigError(f"--admin-token-file {path} can be read by others: chmod 600 it")
    return token, None


def resolve_dtype(name: DTypeName, accelerator: Accelerator) -> torch.dtype:
    """The dtype of the weights."""
    if name == "auto":
        return torch.float32 if accelerator.device_type == "cpu" else torch.bfloat16
    return getattr(torch, name)


def build_worker(config: ServeConfig, model: ModelConfig, world: World) -> Worker:
    """This rank's worker, with its weights if they are to be loaded. Collective."""
    group = world.group if world.size > 1 else None
    dtype = resolve_dtype(config.dtype, world.accelerator)
    return Worker(model, config.engine, world.accelerator, dtype, group, config.timeout_s)


def serve(config: ServeConfig) -> None:
    """Serves until SIGINT or SIGTERM. Called on every rank.

    Raises:
        ConfigError: no model there, the address cannot be listened on, or it is not local while the token is a new one.
    """
    accelerator = get_accelerator()
    source = open_source(config.model)
    model, eos_ids = source.config, eos_ids_of(source)
    source.close()
    with join_world(accelerator, config.timeout_s) as world:
        worker = build_worker(config, model, world)
        ranks = Ranks(worker.execute, world.group if world.size > 1 else None)
        with _signals() as stop:
            if world.rank != 0:  # rank 0 says when to stop
                ranks.follow()
                return
            try:
                _lead(config, ranks, worker, eos_ids, stop)
            finally:
                with contextlib.suppress(Exception):
                    ranks.stop()


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set instead of what they would do."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _lead(config: ServeConfig, ranks: Ranks, worker: Worker, eos_ids: list[int], stop: threading.Event) -> None:
    token, made = read_admin_token(config.admin_token_file)
    try:
        if config.host not in LOCAL and made is not None:
            raise ConfigError(
                f"--host {config.host} is not this machine alone: give --admin-token-file, so that you know who can "
                "change the engine"
            )
        tokenizer = None if config.tokenizer is None else load_tokenizer(config.tokenizer)
        if tokenizer is not None and not eos_ids:
            eos_ids = [tokenizer.eos_id]
        with listen(config.host, config.port) as sock:
            loop = EngineLoop(ranks, worker, worker.engine.version, config.timeout_s)
            if config.load_weights:
                loop.is_paused = True
                loop.load_disk(str(config.model), loop.version)
                loop.is_paused = False
            api = Api(loop, token, str(config.model), tokenizer, eos_ids)
            with Server(loop, api, sock):
                logger.info("serving %s on http://%s:%d", config.model, config.host, sock.getsockname()[1])
                logger.info("admin token in %s", made or config.admin_token_file)
                while loop.is_alive and not stop.wait(0.2):
                    continue
            if loop.failure is not None:
                raise EngineFailed(f"the engine has failed: {loop.failure}")
    finally:
        if made is not None:
            made.unlink(missing_ok=True)
