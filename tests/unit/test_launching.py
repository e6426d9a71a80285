"""Launches that are like an earlier one skip Triton's look-up; all others do not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise.kernels import launching


class Kernel:
    """Stands for a compiled kernel's interface: records what was compiled and what was launched."""

    arg_names = ("x_ptr", "count", "size", "BLOCK", "WIDE")

    def __init__(self) -> None:
        self.params = [SimpleNamespace(do_not_specialize=name == "count") for name in self.arg_names]
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*arguments: Any, num_warps: int, **constants: Any) -> Any:
            self.compiled.append((grid, arguments, constants, num_warps))
            return self.repeats()

        return run

    def repeats(self) -> Any:
        class Repeats:
            def __getitem__(_, grid: tuple[int, ...]):  # noqa: N805
                return lambda *arguments: self.launched.append((grid, arguments))

        return Repeats()


@pytest.fixture
def kernel(monkeypatch) -> Kernel:
    monkeypatch.setattr(launching, "is_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name, empty in (("_compiled", {}), ("_varying", {}), ("_refused", [])):
        monkeypatch.setattr(launching, name, empty)
    return Kernel()


def run(kernel: Kernel, x: torch.Tensor, count: int = 3, size: int = 8, warps: int = 4, **constants: Any) -> None:
    launching.launch(kernel, 7, (x, count, size), warps, **({"WIDE": False, "BLOCK": 16} | constants))


def test_a_repeat_goes_to_the_compiled_kernel_with_constants_in_order(kernel: Kernel) -> None:
    x, y = torch.zeros(64), torch.ones(64)
    run(kernel, x)
    run(kernel, y, count=5)
    assert kernel.compiled == [((7,), (x, 3, 8), {"WIDE": False, "BLOCK": 16}, 4)]
    ((grid, arguments),) = kernel.launched
    assert grid == (7, 1, 1)
    assert arguments[0] is y
    assert arguments[1:] == (5, 8, 16, False)


@pytest.mark.parametrize(
    "changed",
    [
        {"x": torch.zeros(65)[1:]},
        {"x": torch.zeros(64, dtype=torch.float64)},
        {"count": 2**31},
        {"size": 9},
        {"warps": 8},
        {"BLOCK": 32},
    ],
    ids=["alignment", "dtype", "a wide integer", "a number it is specialized for", "warps", "a constant"],
)
def test_what_a_kernel_is_compiled_for_makes_a_launch_another(kernel: Kernel, changed: dict[str, Any]) -> None:
    usual = {"x": torch.zeros(64)}
    run(kernel, **usual)
    run(kernel, **(usual | changed))
    assert len(kernel.compiled) == 2
    assert kernel.launched == []


def test_a_triton_that_launches_otherwise_is_used_as_usual(kernel: Kernel, monkeypatch, caplog) -> None:
    monkeypatch.setattr(kernel, "repeats", lambda: None)
    for _ in range(3):
        run(kernel, torch.zeros(64))
    assert len(kernel.compiled) == 3
    assert caplog.text.count("not launched directly") == 1
