"""Operators are what `torch.library.custom_op` would make, for the compiler, for modes that watch, and for callers."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.kernels.operators import operator


@operator("test_scaled")
def scaled(x: torch.Tensor, by: float, plus: torch.Tensor | None = None) -> torch.Tensor:
    return x * by if plus is None else x * by + plus


@operator("test_count", mutates_args=("counter",))
def count(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    counter += 1
    return x + counter


@torch.library.register_fake("equipoise::test_scaled")
def _(x, by, plus=None):
    return torch.empty_like(x)


@torch.library.register_fake("equipoise::test_count")
def _(x, counter):
    return torch.empty_like(x)


def test_calls_take_names_and_defaults() -> None:
    x = torch.arange(3.0)
    assert scaled(x, 2.0).tolist() == [0, 2, 4]
    assert scaled(x, by=2.0, plus=x).tolist() == [0, 3, 6]


def test_schemas_say_what_changes() -> None:
    torch.library.opcheck(scaled, (torch.ones(3), 2.0))
    torch.library.opcheck(count, (torch.ones(3), torch.zeros(())))


def test_compiled_code_sees_changes() -> None:
    def function(x, counter):
        return count(scaled(x, 3.0), counter) + counter

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x, counters = torch.ones(2), (torch.zeros(()), torch.zeros(()))
    for _ in range(2):
        assert torch.equal(function(x, counters[0]), compiled(x, counters[1]))
    assert counters[0] == counters[1] == 2


def test_modes_see_one_operator() -> None:
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        scaled(torch.ones(2), 2.0, torch.ones(2))
    assert seen[-1] == torch.ops.equipoise.test_scaled.default
    assert all(func is not torch.ops.aten.mul.Tensor for func in seen)
