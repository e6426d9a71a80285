"""Launches of Triton kernels whose repeats cost the host little.

Triton looks at every argument and setting of a launch to find the compiled kernel, which takes the host several times
as long as the launch itself. Here a launch that is like an earlier one (`_form`) goes to its compiled kernel directly.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from equipoise.kernels.triton_support import is_interpreted

logger = logging.getLogger(__name__)
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""By form: the compiled kernel, and the constants in the order of its parameters."""
_refused: list[str] = []
"""Why a version of Triton does not launch compiled kernels so."""
_varying: dict[int, tuple[bool, ...]] = {}
"""By kernel: which of its parameters are numbers that it is not specialized for."""


def launch(kernel: Any, programs: int, arguments: Sequence[Any], num_warps: int, **constants: Any) -> None:
    """Runs a kernel with a grid of one axis on the current stream.

    Args:
        kernel: a `triton.jit` function whose parameters are `arguments` (tensors, integers, constants), then
            `constants`.
        constants: those of the `tl.constexpr` parameters that are not among the arguments.
    """
    if is_interpreted() or _refused:
        kernel[(programs,)](*arguments, **constants, num_warps=num_warps)
        return
    key = (id(kernel), torch.cuda.current_device(), num_warps, *constants.values(), *_form(kernel, arguments))
    known = _compiled.get(key)
    if known is None:
        compiled = kernel[(programs,)](*arguments, **constants, num_warps=num_warps)
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        return
    compiled, ordered = known
    try:
        compiled[(programs, 1, 1)](*arguments, *ordered)
    except (TypeError, AttributeError) as error:  # before anything has run
        logger.warning("this Triton's compiled kernels are not launched directly, which costs the host time: %s", error)
        _refused.append(str(error))
        kernel[(programs,)](*arguments, **constants, num_warps=num_warps)


def _form(kernel: Any, arguments: Sequence[Any]) -> list[Any]:
    """What of the arguments a kernel is compiled for: dtypes, alignment, width of integers, values of others."""
    varying = _varying.get(id(kernel))
    if varying is None:
        varying = _varying[id(kernel)] = tuple(parameter.do_not_specialize for parameter in kernel.params)
    form: list[Any] = []
    for value, varies in zip(arguments, varying):
        if isinstance(value, torch.Tensor):
            form.append(value.dtype)
            form.append(value.data_ptr() % 16 == 0)
        else:
            form.append(-(2**31) <= value < 2**31 if varies else value)
    return form
