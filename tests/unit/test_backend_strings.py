"""Backend strings are parsed, and "nccl" means the selected accelerator's transport."""

import pytest
import torch.distributed as dist
from torch.distributed import Backend, distributed_c10d

from equipoise.accelerator import Accelerator, CPUAccelerator, CUDAAccelerator, MUSAAccelerator
from equipoise.distributed import backends
from equipoise.distributed.backends import carries, format_backend, parse_backend, resolve_backend
from equipoise.errors import ConfigError

CPU, CUDA, MUSA = CPUAccelerator(), CUDAAccelerator(), MUSAAccelerator()


@pytest.mark.parametrize(
    ("text", "transports"),
    [
        ("cpu:gloo,musa:mccl", {"cpu": "gloo", "musa": "mccl"}),
        ("CPU:Gloo, CUDA:NCCL", {"cpu": "gloo", "cuda": "nccl"}),
        ("cuda:nccl", {"cuda": "nccl"}),
        ("nccl", {"cuda": "nccl"}),
        ("gloo", dict.fromkeys(Backend.backend_capability["gloo"], "gloo")),
        ("xccl", {"xpu": "xccl"}),
    ],
)
def test_parsing(text: str, transports: dict[str, str]) -> None:
    assert parse_backend(text) == transports
    assert parse_backend(format_backend(transports)) == transports


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("xnccl", "'xnccl' is no registered communication backend; registered are .*gloo"),
        ("", "'' is no registered"),
        ("cpu:gloo,nccl", "'nccl' in the communication backend"),
        ("cpu:gloo,", "'' in the communication backend"),
        ("cpu:gloo:nccl", "expected <device type>:<transport>"),
        (":gloo", "expected <device type>"),
        ("cpu:gloo,cpu:mpi", "names 'cpu' twice"),
    ],
)
def test_malformed_strings_say_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_backend(text)


def test_a_group_carries_what_its_map_says_not_what_its_name_contains() -> None:
    assert carries("nccl", "cuda")
    assert not carries("nccl", "cpu")
    assert carries("cpu:gloo,musa:mccl", "musa")
    assert not carries("cpu:gloo,musa:mccl", "cuda")


@pytest.mark.parametrize(
    ("accelerator", "asked", "inherited", "expected"),
    [
        (CUDA, "nccl", None, "nccl"),
        (MUSA, "nccl", None, "mccl"),
        (MUSA, "NCCL", None, "mccl"),
        (CPU, "nccl", None, "gloo"),
        (MUSA, "mccl", None, "mccl"),
        (MUSA, "gloo", None, "gloo"),
        (MUSA, "cpu:gloo,musa:mccl", None, "cpu:gloo,musa:mccl"),
        (MUSA, None, "nccl", "mccl"),
        (MUSA, None, "cpu:gloo,musa:mccl", "cpu:gloo,musa:mccl"),
        (CUDA, None, "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        (MUSA, "gloo", "nccl", "gloo"),
        (CPU, None, None, "gloo"),
        (CUDA, None, None, "cpu:gloo,cuda:nccl"),
        (MUSA, None, None, "cpu:gloo,musa:mccl"),
    ],
)
def test_resolving(accelerator: Accelerator, asked: str | None, inherited: str | None, expected: str) -> None:
    assert resolve_backend(asked, accelerator, inherited) == expected


def test_another_vendors_transport_is_refused() -> None:
    with pytest.raises(ConfigError, match="'mccl' is no registered"):
        resolve_backend("mccl", CUDA)


def test_third_party_code_is_reached_only_inside_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []

    def init_process_group(backend=None, init_method=None, timeout=None):  # type: ignore[no-untyped-def]
        calls.append(("init", backend, timeout))

    def new_group(ranks=None, timeout=None, backend=None, pg_options=None):  # type: ignore[no-untyped-def]
        calls.append(("new", ranks, backend))

    for module in (dist, distributed_c10d):
        monkeypatch.setattr(module, "init_process_group", init_process_group)
        monkeypatch.setattr(module, "new_group", new_group)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")

    with backends.resolved_backends(MUSA):
        dist.init_process_group("nccl", timeout=5)
        dist.init_process_group()
        distributed_c10d.new_group([0, 1], None, "nccl")
        dist.new_group([0])
        dist.new_group(backend="gloo")
        with backends.resolved_backends(CPU):
            dist.new_group([1], backend="nccl")
    assert calls == [
        ("init", "mccl", 5),
        ("init", None, None),
        ("new", [0, 1], "mccl"),
        ("new", [0], "mccl"),
        ("new", None, "gloo"),
        ("new", [1], "gloo"),
    ]
    with pytest.raises(ZeroDivisionError), backends.resolved_backends(MUSA):
        raise ZeroDivisionError
    for module in (dist, distributed_c10d):
        assert module.init_process_group is init_process_group
        assert module.new_group is new_group
