"""Moore Threads GPUs: `torch.musa` (from the package torch_musa), MCCL.

What the vendor's software needs before first use is data of this file: torch_musa, when torch has not loaded
it by itself, then the first patch module that is installed. Nothing of it is imported before MUSA has been
chosen.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

import torch

from equipoise.accelerator.base import Capability
from equipoise.accelerator.registry import Registration
from equipoise.accelerator.torch_accelerator import TorchAccelerator

RUNTIME_MODULE = "torch_musa"
#: Alternatives, in order; the vendor has renamed its patch once.
PATCH_MODULES = ("musa_patch", "musa_titan")
PATCH_PATH_VARIABLE = "MUSA_PATCH_PATH"
VISIBLE_DEVICES_VARIABLE = "MUSA_VISIBLE_DEVICES"


class MUSAAccelerator(TorchAccelerator):
    """Delegates to `torch.musa`."""

    name = "musa"
    device_type = "musa"
    visible_devices_variables = (VISIBLE_DEVICES_VARIABLE,)
    allocator_variables = ("PYTORCH_MUSA_ALLOC_CONF",)

    def communication_backend(self) -> str:
        """Always "mccl"."""
        return "mccl"

    def weight_update_backend(self) -> str:
        """ "cpu:gloo,musa:mccl": MCCL carries no CPU tensors, so metadata takes Gloo."""
        return self.world_backend()

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Mixed precision by `torch.musa.amp.autocast`, or by torch's own where there is none."""
        own = getattr(getattr(self.namespace, "amp", None), "autocast", None)
        if own is None:
            return super().autocast(dtype)
        return own(enabled=False) if dtype == torch.float32 else own(dtype=dtype)


def bootstrap(environ: Mapping[str, str]) -> None:
    """Load torch_musa if torch has not, then the vendor's patch, looked for in `MUSA_PATCH_PATH` too.

    A patch that is not installed is a warning. `ModuleNotFoundError` when one is and lacks a module that it
    needs.
    """
    folder = environ.get(PATCH_PATH_VARIABLE, "").strip()
    if folder and folder.lower() != "auto" and folder not in sys.path:
        sys.path.append(folder)
    if not hasattr(torch, "musa"):
        _import_if_installed(RUNTIME_MODULE)
    if not any(_import_if_installed(module) for module in PATCH_MODULES):
        warnings.warn(
            f"MUSA was chosen and no patch module is installed ({' or '.join(PATCH_MODULES)}); none loaded. "
            f"If torch_musa needs one, put its folder into {PATCH_PATH_VARIABLE}",
            RuntimeWarning,
            stacklevel=2,
        )


def _import_if_installed(module: str) -> bool:
    """Import it; False when it is not there, its own error when something that it needs is not."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return False
    return True


def is_available() -> Capability:
    """Whether `torch.musa` is loaded and sees a device. Loads nothing itself."""
    namespace = getattr(torch, "musa", None)
    if namespace is None:
        return Capability(False, f"torch has no torch.musa: {RUNTIME_MODULE} is not installed or not loaded")
    if not namespace.is_available():
        return Capability(False, "torch.musa.is_available() says no")
    seen = MUSAAccelerator().visible_devices()
    return Capability(True, f"{namespace.device_count()} device(s) through torch.musa; visible: {seen}")


def hint() -> str | None:
    """The vendor's package, when it is installed and no device could be used."""
    if find_spec(RUNTIME_MODULE) is None:
        return None
    return f"{RUNTIME_MODULE} is installed; set EQUIPOISE_ACCELERATOR=musa to see why it is not used"


REGISTRATION = Registration(
    name="musa",
    factory=MUSAAccelerator,
    is_available=is_available,
    priority=200,
    communication_backends=("mccl",),
    request_variables=(VISIBLE_DEVICES_VARIABLE, PATCH_PATH_VARIABLE),
    bootstrap=bootstrap,
    hint=hint,
)
