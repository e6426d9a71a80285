"""Backend strings of `torch.distributed`, parsed into maps from device type to transport.

A backend string is one name ("nccl") or pairs ("cpu:gloo,cuda:nccl"). "nccl" is also what code written for
NVIDIA says when it means "the accelerator's transport": `resolve_backend` turns it into the selected
backend's own. No decision here is made by looking for a name inside a longer one.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import Backend, distributed_c10d

from equipoise.accelerator import Accelerator
from equipoise.errors import ConfigError

#: The name that stands for the transport of whatever accelerator was selected.
LOGICAL_BACKEND = "nccl"

_PAIR = re.compile(r"([a-z][a-z0-9_]*):([a-z][a-z0-9_]*)")


def parse_backend(backend: str) -> dict[str, str]:
    """`{device type: transport}` of a backend string, in the string's order.

    A single name serves the device types that it was registered for. Raises `ConfigError` for a malformed
    string, a device type given twice, and a single name that is not registered.
    """
    text = backend.strip().lower()
    if ":" not in text:
        if text not in Backend.backend_capability:
            known = ", ".join(sorted(Backend.backend_capability))
            raise ConfigError(
                f"{backend!r} is no registered communication backend; registered are {known}; "
                "give one of them, or pairs such as 'cpu:gloo,cuda:nccl'"
            )
        return dict.fromkeys(Backend.backend_capability[text], text)
    transports: dict[str, str] = {}
    for part in text.split(","):
        match = _PAIR.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"{part!r} in the communication backend {backend!r} is not understood; "
                "expected <device type>:<transport>, as in 'cpu:gloo,cuda:nccl'"
            )
        device_type, transport = match.groups()
        if device_type in transports:
            raise ConfigError(f"the communication backend {backend!r} names {device_type!r} twice; name it once")
        transports[device_type] = transport
    return transports


def format_backend(transports: dict[str, str]) -> str:
    """The backend string of a map, pair by pair."""
    return ",".join(f"{device_type}:{transport}" for device_type, transport in transports.items())


def carries(backend: str, device_type: str) -> bool:
    """Whether a group of this backend takes tensors of `device_type`. Raises as `parse_backend` does."""
    return device_type in parse_backend(backend)


def resolve_backend(backend: str | None, accelerator: Accelerator, inherited: str | None = None) -> str:
    """The backend string that a group of this accelerator is made with.

    `backend` is what was asked for; None inherits `inherited`, the default group's, and without that it is
    `accelerator.world_backend()`. A lone "nccl" becomes the accelerator's own transport. Everything else
    stays as it is: "gloo", a transport's own name, and pairs. Raises `ConfigError` as `parse_backend` does.
    """
    chosen = backend if backend is not None else inherited
    if chosen is None:
        return accelerator.world_backend()
    text = str(chosen).strip().lower()
    if text == LOGICAL_BACKEND:
        return accelerator.communication_backend()
    if text != accelerator.communication_backend():  # may be registered only when the vendor's package loads
        parse_backend(text)
    return text


def new_group(
    accelerator: Accelerator, ranks: list[int] | None = None, backend: str | None = None, **options: Any
) -> Any:
    """`torch.distributed.new_group` with `backend` resolved, whether given or inherited from the default
    group."""
    inherited = str(dist.get_backend()) if backend is None else None
    return distributed_c10d.new_group(ranks=ranks, backend=resolve_backend(backend, accelerator, inherited), **options)


@contextmanager
def resolved_backends(accelerator: Accelerator) -> Iterator[None]:
    """Inside, `torch.distributed.init_process_group` and `new_group` resolve their `backend` argument.

    For third-party code that asks for "nccl" on every device. Functions that such code bound before
    (`from torch.distributed import new_group`) are not reached. On exit torch's own functions are back.
    """
    modules = (dist, distributed_c10d)
    before = [(module, name, getattr(module, name)) for module in modules for name in _RESOLVED]
    for module, name, original in before:
        setattr(module, name, _resolving(original, accelerator, inherits=name == "new_group"))
    try:
        yield
    finally:
        for module, name, original in before:
            setattr(module, name, original)


_RESOLVED = ("init_process_group", "new_group")


def _resolving(original: Callable[..., Any], accelerator: Accelerator, inherits: bool) -> Callable[..., Any]:
    """`original` with its argument `backend` resolved; a backend left out is resolved only if it is
    inherited."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        backend = bound.arguments.get("backend")
        if backend is None and inherits:
            bound.arguments["backend"] = resolve_backend(None, accelerator, str(dist.get_backend()))
        elif backend is not None:
            bound.arguments["backend"] = resolve_backend(backend, accelerator)
        return original(*bound.args, **bound.kwargs)

    return call
