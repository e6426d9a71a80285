"""Clients of serving engines behind one protocol. Accelerator selection is final before any of their packages load."""

from typing import Literal

from equipoise.accelerator import initialize_accelerator
from equipoise.distributed.weight_update import EngineClient

EngineKind = Literal["equipoise", "sglang", "vllm"]

initialize_accelerator()  # first: what the clients import may look for devices itself


def connect(kind: EngineKind, url: str, token: str | None = None, **options: object) -> EngineClient:
    """A client of the engine at `url`. `token`: its admin token or API key.

    Raises:
        ValueError: another kind.
    """
    if kind == "equipoise":
        from equipoise.serve.clients.reference import ReferenceClient

        return ReferenceClient(url, token, **options)  # type: ignore[arg-type]
    if kind == "sglang":
        from equipoise.serve.clients.sglang import SGLangClient

        return SGLangClient(url, token, **options)  # type: ignore[arg-type]
    if kind == "vllm":
        from equipoise.serve.clients.vllm import VLLMClient

        return VLLMClient(url, token, **options)  # type: ignore[arg-type]
    raise ValueError(f"there is no engine {kind!r}: choose equipoise, sglang or vllm")
