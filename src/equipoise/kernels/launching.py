"""Launches of Triton kernels whose repeats cost the host little.

Triton looks at every argument and setting of a launch to find the compiled kernel, which takes the host several times
as long as the launch itself. Here a launch that is like an earlier one goes to its compiled kernel directly, with
addresses in place of tensors.
"""

import logging
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import torch

from equipoise.kernels.triton_support import is_interpreted

logger = logging.getLogger(__name__)
_launchers: dict[tuple[Any, ...], "Launcher"] = {}
"""Of `launch`, by kernel, warps and constants."""
_refused: list[str] = []
"""Why a version of Triton does not launch compiled kernels so."""
_NEAR_BYTES = 2**31 - 1 if torch.version.hip else 0
"""For AMD, Triton compiles kernels with offsets of 32 bits for tensors in storages of at most so many bytes."""


class Launcher:
    """One kernel with its warps and constants, for any number of launches with a grid of one axis.

    Args:
        kernel: a `triton.jit` function whose parameters are those of `bound`, the arguments of a call, and `constants`.
        bound: first arguments that are the same for all launches; tensors among them stay where they are.
        constants: `tl.constexpr` parameters that are not among the arguments, and options of Triton.

    Compiled kernels are remembered by the dtypes and alignment of tensors (on AMD by whether they are large, too), by
    what Triton distinguishes of integers, and by the values of constants: not by other values, so there are few.
    """

    def __init__(self, kernel: Any, num_warps: int, bound: Sequence[Any] = (), **constants: Any) -> None:
        self._kernel, self._num_warps, self._bound, self._constants = kernel, num_warps, tuple(bound), constants
        self._passed = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in bound]
        self._is_interpreted = is_interpreted()
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    @cached_property
    def _specialized(self) -> list[bool | None]:
        """Of each argument of a call, if it is an integer: whether the kernel is specialized for it; None: it is a
        constant."""
        free = self._kernel.params[len(self._bound) :]
        return [None if p.is_constexpr else not p.do_not_specialize for p in free]

    def __call__(self, programs: int, *arguments: Any) -> None:
        """Launches on the current stream. `arguments`: tensors on its device, their descriptors, numbers, constants;
        None for what the kernel's constants say is not there."""
        if self._is_interpreted or _refused:
            self._launch(programs, arguments)
            return
        device, stream = device_and_stream()
        form: list[Any] = [device]
        passed = self._passed.copy()
        for value, specialized in zip(arguments, self._specialized):
            if isinstance(value, torch.Tensor):
                address = value.data_ptr()
                passed.append(address)
                form.append(value.dtype if address % 16 == 0 else (value.dtype,))
                if _NEAR_BYTES:
                    form.append(value.untyped_storage().nbytes() <= _NEAR_BYTES)
            else:
                passed.append(value)
                if specialized is None or value is None:
                    form.append(value)
                elif hasattr(value, "block_shape"):
                    form.append((value.base.dtype, *value.block_shape))
                elif specialized:
                    form.append(_specialization(value))
                elif not -(2**31) <= value < 2**31:  # others have one type, and add nothing
                    form.append((len(passed), _width(value)))
        known = self._compiled.get(tuple(form))
        if known is None:
            compiled, names = self._launch(programs, arguments), self._kernel.arg_names[len(passed) :]
            self._compiled[tuple(form)] = compiled, tuple(self._constants[name] for name in names)
            return
        compiled, constants = known
        try:
            if _is_watched():
                compiled[(programs, 1, 1)](*self._bound, *arguments, *constants)
            else:
                function, metadata = compiled.function, compiled.packed_metadata
                compiled.run(programs, 1, 1, stream, function, metadata, None, None, None, *passed, *constants)
        except (TypeError, AttributeError) as error:  # before anything has run
            logger.warning(
                "this Triton's compiled kernels are not launched directly, which costs the host time: %s", error
            )
            _refused.append(str(error))
            self._launch(programs, arguments)

    def _launch(self, programs: int, arguments: Sequence[Any]) -> Any:
        return self._kernel[(programs,)](*self._bound, *arguments, **self._constants, num_warps=self._num_warps)


def launch(kernel: Any, programs: int, arguments: Sequence[Any], num_warps: int, **constants: Any) -> None:
    """Runs a kernel by the `Launcher` of its warps and constants."""
    key = (id(kernel), num_warps, *constants.values())
    launcher = _launchers.get(key)
    if launcher is None:
        launcher = _launchers[key] = Launcher(kernel, num_warps, **constants)
    launcher(programs, *arguments)


def _width(value: int) -> int:
    """Which type Triton gives an integer."""
    return 32 if -(2**31) <= value < 2**31 else 64 if value < 2**63 else 65


def _specialization(value: int) -> int:
    """What a kernel is compiled for of an integer: that it is 1, or its type and whether 16 divides it."""
    return 1 if value == 1 else 2 * _width(value) + (value % 16 == 0)


@cache
def _triton_runtime() -> tuple[Any, Any]:
    """Triton's drivers, and what it is told of launches."""
    from triton import knobs
    from triton.runtime import driver

    return driver, knobs.runtime


def device_and_stream() -> tuple[int, int]:
    """The current device's number and its current stream, as Triton takes them."""
    active = _triton_runtime()[0].active
    device = active.get_current_device()
    return device, active.get_current_stream(device)


def _is_watched() -> bool:
    """Whether somebody wants to see launches, as Triton's profiler does."""
    runtime = _triton_runtime()[1]
    return _is_set(runtime.launch_enter_hook) or _is_set(runtime.launch_exit_hook)


def _is_set(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))
