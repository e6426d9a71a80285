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
        self.params = [
            SimpleNamespace(is_constexpr=name.isupper(), do_not_specialize=name == "count") for name in self.arg_names
        ]
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*arguments: Any, num_warps: int, **constants: Any) -> Any:
            self.compiled.append((grid, arguments, constants, num_warps))
            return self.repeats()

        return run

    def repeats(self) -> Any:
        return SimpleNamespace(
            function=11, packed_metadata=(4,), run=lambda *arguments: self.launched.append(arguments)
        )


@pytest.fixture
def kernel(monkeypatch) -> Kernel:
    monkeypatch.setattr(launching, "is_interpreted", lambda: False)
    monkeypatch.setattr(launching, "device_and_stream", lambda: (0, 77))
    monkeypatch.setattr(launching, "_is_watched", lambda: False)
    for name, empty in (("_launchers", {}), ("_refused", [])):
        monkeypatch.setattr(launching, name, empty)
    return Kernel()


def run(kernel: Kernel, x: torch.Tensor, count: int = 3, size: int = 8, warps: int = 4, **constants: Any) -> None:
    launching.launch(kernel, 7, (x, count, size), warps, **({"WIDE": False, "BLOCK": 16} | constants))


def test_a_repeat_goes_to_the_compiled_kernel_with_addresses_and_constants_in_order(kernel: Kernel) -> None:
    x, y = torch.zeros(64), torch.ones(64)
    run(kernel, x)
    run(kernel, y, count=5)
    assert kernel.compiled == [((7,), (x, 3, 8), {"WIDE": False, "BLOCK": 16}, 4)]
    assert kernel.launched == [(7, 1, 1, 77, 11, (4,), None, None, None, y.data_ptr(), 5, 8, 16, False)]


def test_grids_share_a_compiled_kernel(kernel: Kernel) -> None:
    for programs in (7, 9):
        launching.launch(kernel, programs, (torch.zeros(64), 3, 8), 4, WIDE=False, BLOCK=16)
    assert len(kernel.compiled) == 1
    assert kernel.launched[0][0] == 9


def test_bound_arguments_come_first(kernel: Kernel) -> None:
    x = torch.zeros(64)
    launcher = launching.Launcher(kernel, 4, (x, 3), WIDE=True, BLOCK=32)
    for size in (8, 24):
        launcher(7, size)
    assert kernel.compiled == [((7,), (x, 3, 8), {"WIDE": True, "BLOCK": 32}, 4)]
    assert kernel.launched[0][9:] == (x.data_ptr(), 3, 24, 32, True)


@pytest.mark.parametrize(
    "changed",
    [
        {"x": torch.zeros(65)[1:]},
        {"x": torch.zeros(64, dtype=torch.float64)},
        {"count": 2**31},
        {"size": 16},
        {"size": 1},
        {"size": 2**31 + 8},
        {"warps": 8},
        {"BLOCK": 32},
    ],
    ids=[
        "alignment",
        "dtype",
        "a wide integer",
        "a multiple of 16",
        "one",
        "a wide integer it is specialized for",
        "warps",
        "a constant",
    ],
)
def test_what_a_kernel_is_compiled_for_makes_a_launch_another(kernel: Kernel, changed: dict[str, Any]) -> None:
    usual = {"x": torch.zeros(64)}
    run(kernel, **usual)
    run(kernel, **(usual | changed))
    assert len(kernel.compiled) == 2
    assert kernel.launched == []


def test_on_amd_parts_of_a_large_storage_are_others(kernel: Kernel, monkeypatch) -> None:
    """Triton compiles kernels there with offsets of 32 bits for small ones."""
    monkeypatch.setattr(launching, "_NEAR_BYTES", 256)
    for x in (torch.zeros(64), torch.zeros(80)[:64], torch.ones(64), torch.ones(80)):
        run(kernel, x)
    assert [arguments[0].untyped_storage().nbytes() for _, arguments, _, _ in kernel.compiled] == [256, 320]
    assert len(kernel.launched) == 2


def test_what_is_remembered_does_not_grow_with_the_values_of_integers(kernel: Kernel) -> None:
    x = torch.zeros(64)
    for value in range(2, 200):
        run(kernel, x, count=value, size=value)
        passed = kernel.compiled[-1][1][1:] if value in (2, 16) else kernel.launched[-1][10:12]
        assert passed == (value, value)
    (launcher,) = launching._launchers.values()
    assert len(kernel.compiled) == len(launcher._compiled) == 2, "multiples of 16, and others"


def test_integers_are_told_apart_as_triton_does() -> None:
    """Against Triton's own key of a compiled kernel."""
    native_specialize_impl = getattr(pytest.importorskip("triton._C.libtriton"), "native_specialize_impl", None)
    if native_specialize_impl is None:
        pytest.skip("this Triton makes its keys otherwise")
    from triton.backends.compiler import BaseBackend

    values = [-17, -16, -1, 0, 1, 2, 15, 16, 2**31 - 1, 2**31, 2**31 + 1, -(2**31) - 16, 2**63 - 1, 2**63, 2**64 - 1]
    ours = [launching._specialization(value) for value in values]
    theirs = [native_specialize_impl(BaseBackend, value, False, True, True) for value in values]
    for i in range(len(values)):
        for j in range(len(values)):
            assert ours[i] != ours[j] or theirs[i] == theirs[j], (values[i], values[j])


def descriptor(dtype: torch.dtype = torch.float32, columns: int = 16) -> Any:
    return SimpleNamespace(base=torch.zeros(8, dtype=dtype), block_shape=[1, columns])


def test_descriptors_are_passed_as_they_are_and_known_by_their_blocks(kernel: Kernel) -> None:
    given = [descriptor() for _ in range(3)]
    for x in given:
        run(kernel, x)  # type: ignore[arg-type]
    assert [arguments[9] for arguments in kernel.launched] == given[1:]
    for x in (descriptor(torch.float16), descriptor(columns=32), None, torch.zeros(8)):
        run(kernel, x)  # type: ignore[arg-type]
    assert len(kernel.compiled) == 5
    run(kernel, None)  # type: ignore[arg-type]
    assert kernel.launched[-1][9] is None


def test_launches_that_somebody_watches_go_through_triton(kernel: Kernel, monkeypatch) -> None:
    seen: list[tuple[Any, ...]] = []

    class Compiled:
        def __getitem__(self, grid):
            return lambda *arguments: seen.append((grid, *arguments))

    x = torch.zeros(64)
    monkeypatch.setattr(launching, "_is_watched", lambda: True)
    monkeypatch.setattr(kernel, "repeats", Compiled)
    run(kernel, x)
    run(kernel, x)
    assert seen[0][0] == (7, 1, 1)
    assert seen[0][1] is x
    assert seen[0][2:] == (3, 8, 16, False)


def test_a_triton_that_launches_otherwise_is_used_as_usual(kernel: Kernel, monkeypatch, caplog) -> None:
    monkeypatch.setattr(kernel, "repeats", lambda: None)
    for _ in range(3):
        run(kernel, torch.zeros(64))
    assert len(kernel.compiled) == 3
    assert caplog.text.count("not launched directly") == 1
