"""Backend contract, backends and selection: every device difference goes through here.

Importing this package needs no hardware, starts no device context, and changes neither environment nor RNG.
"""

from equipoise.accelerator.base import CAPABILITIES, Accelerator, Capability, Event, MemoryStats, OutOfMemory
from equipoise.accelerator.cpu import CPUAccelerator
from equipoise.accelerator.cuda import CUDAAccelerator
from equipoise.accelerator.generic import GenericAccelerator
from equipoise.accelerator.musa import MUSAAccelerator
from equipoise.accelerator.registry import ENTRY_POINT_GROUP, Registration
from equipoise.accelerator.selection import (
    VARIABLE,
    accelerator_for,
    get_accelerator,
    initialize_accelerator,
    register,
    register_accelerator,
    reset,
    selection_report,
    set_accelerator,
)
from equipoise.accelerator.torch_accelerator import TorchAccelerator
from equipoise.accelerator.visible_devices import PhysicalId, VisibleDevices

__all__ = [
    "CAPABILITIES",
    "ENTRY_POINT_GROUP",
    "VARIABLE",
    "Accelerator",
    "CPUAccelerator",
    "CUDAAccelerator",
    "Capability",
    "Event",
    "GenericAccelerator",
    "MUSAAccelerator",
    "MemoryStats",
    "OutOfMemory",
    "PhysicalId",
    "Registration",
    "TorchAccelerator",
    "VisibleDevices",
    "accelerator_for",
    "get_accelerator",
    "initialize_accelerator",
    "register",
    "register_accelerator",
    "reset",
    "selection_report",
    "set_accelerator",
]
