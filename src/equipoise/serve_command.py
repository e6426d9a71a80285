"""`equipoise serve`: the reference engine behind HTTP."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from equipoise import launch
from equipoise.exit_codes import exit_codes
from equipoise.options import NprocPerNode

if TYPE_CHECKING:
    pass

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]


def serve(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="A Hugging Face or native folder, a checkpoint (step-<n>), or a run."),
    ],
    nproc_per_node: NprocPerNode = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 30000,
    dtype: Annotated[DTypeName, typer.Option(help="Of the weights; auto: float32 on CPU, else bfloat16.")] = "auto",
    load_weights: Annotated[
        bool, typer.Option("--load-weights/--no-load-weights", help="Without: weights come with the first update.")
    ] = True,
    admin_token_file: Annotated[
        Path | None, typer.Option(show_default="a new token in a new file", help="Token of routes that change things.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="For text: bytes, a tokenizer.json or its folder; default: token ids only.")
    ] = None,
    max_running_requests: Annotated[int, typer.Option(min=1, help="Sequences in work at a time, per process.")] = 16,
    context_length: Annotated[int, typer.Option(min=1, help="Tokens of prompt and output together.")] = 2048,
    timeout_s: Annotated[float, typer.Option(min=1, help="Longest time without progress of a weight update.")] = 300.0,
) -> None:
    """Serve a model: generation with log-probabilities and routes, and weight updates while it runs.

    The API is SGLang's as RL frameworks use it (docs/serving.md). Several processes share the experts (EP). For testing
    and for loops on one machine: throughput is not its goal.

    \b
    Example:
      equipoise serve runs/demo --tokenizer bytes --port 30000
    """
    with exit_codes():
        count, _ = launch.choose_worker_count(1 if nproc_per_node is None else nproc_per_node)
        options: list[object] = [model, "--nproc-per-node", count, "--host", host, "--port", port, "--dtype", dtype]
        options += ["--load-weights" if load_weights else "--no-load-weights"]
        options += ["--max-running-requests", max_running_requests, "--context-length", context_length]
        options += ["--timeout-s", timeout_s]
        if admin_token_file is not None:
            options += ["--admin-token-file", admin_token_file]
        if tokenizer is not None:
            options += ["--tokenizer", tokenizer]
        values = {
            "model": model,
            "host": host,
            "port": port,
            "dtype": dtype,
            "load_weights": load_weights,
            "admin_token_file": admin_token_file,
            "tokenizer": tokenizer,
            "timeout_s": timeout_s,
            "engine": {"max_running_requests": max_running_requests, "context_length": context_length},
        }
        launch.start(count, ["serve", *map(str, options)], functools.partial(_serve, values))


def _serve(values: dict[str, object]) -> None:
    from equipoise.serve.run import ServeConfig, serve
    from equipoise.train.log import configure_logging

    configure_logging()
    config: ServeConfig = ServeConfig.model_validate(values)
    serve(config)
