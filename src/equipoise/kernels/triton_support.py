"""Whether Triton kernels can run on a device, and why not. Nothing here imports Triton before it is asked.

Files named `*_triton.py` import Triton at their top; everything else imports those files inside functions, so that the
package works where there is no Triton (macOS, Windows).
"""

import importlib.util
import os
from functools import lru_cache

import torch


def is_interpreted() -> bool:
    """Whether Triton's interpreter was asked for: kernels then run on CPU tensors, slowly (FP32, FP16)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def triton_problem(device_type: str) -> str | None:
    """None if Triton kernels run on tensors of this device type (`torch.device.type`), otherwise the reason."""
    return _find_problem(device_type)


@lru_cache
def _find_problem(device_type: str) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device_type == "cpu":
        return None if is_interpreted() else "Triton does not compile for CPUs"
    if is_interpreted():
        return "TRITON_INTERPRET is set, which is for CPU tensors"
    import triton

    try:
        target = triton.runtime.driver.active.get_current_target()
    except Exception as error:  # drivers raise what they like when there is none
        return f"Triton {triton.__version__} finds no device: {str(error).splitlines()[0]}"
    expected = "cuda" if target.backend == "hip" else target.backend
    return None if device_type == expected else f"Triton's device is {target.backend}, the tensors' is {device_type}"


def use_triton(device: torch.device) -> bool:
    """Whether functions that choose by device take their Triton form: on accelerators where it runs.

    Never on a CPU, where only tests ask for it, by name.
    """
    return device.type != "cpu" and triton_problem(device.type) is None


# What `torch.compiler.assume_constant_result` does, without importing the compiler where nothing is compiled: Dynamo
# asks once instead of tracing into import machinery and drivers.
triton_problem._dynamo_marked_constant = True  # type: ignore[attr-defined]
use_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]
