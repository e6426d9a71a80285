"""NVIDIA and ROCm GPUs: `torch.cuda`, NCCL (RCCL carries the same name under ROCm)."""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from equipoise.accelerator import peak_flops as datasheets
from equipoise.accelerator.base import Capability, OutOfMemory
from equipoise.accelerator.registry import Registration
from equipoise.accelerator.torch_accelerator import TorchAccelerator
from equipoise.accelerator.visible_devices import VisibleDevices
from equipoise.errors import ConfigError

NVIDIA_VARIABLES = ("CUDA_VISIBLE_DEVICES",)
ROCM_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
ROCM_OUTER_VARIABLE = "ROCR_VISIBLE_DEVICES"

_log = logging.getLogger("equipoise.accelerator")


class CUDAAccelerator(TorchAccelerator):
    """Delegates to `torch.cuda`. `rocm` says which vendor's runtime this build of torch has."""

    name = "cuda"
    device_type = "cuda"
    allocator_variables = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

    def __init__(self) -> None:
        self.rocm = torch.version.hip is not None
        self._own_counter: tuple[torch.Tensor, bytes, int] | None = None
        self.visible_devices_variables = ROCM_VARIABLES if self.rocm else NVIDIA_VARIABLES

    def visible_devices(self, environ: Mapping[str, str] | None = None) -> VisibleDevices:
        """The physical ids in local order. On ROCm, `ROCR_VISIBLE_DEVICES` is applied before the others."""
        environ = os.environ if environ is None else environ
        inner = super().visible_devices(environ)
        if not self.rocm:
            return inner
        return inner.within(VisibleDevices.from_environment((ROCM_OUTER_VARIABLE,), environ))

    def communication_backend(self) -> str:
        """Always "nccl"."""
        return "nccl"

    def _set_allocator(self, settings: str) -> None:
        torch._C._accelerator_setAllocatorSettings(settings)

    def attach_oom_observer(self, observer: Callable[[OutOfMemory], None]) -> Capability:
        """Registers with torch's allocator; torch keeps the observer until the process ends."""
        answer = self.supports("oom_observer")
        if answer:

            def observed(device: int, requested: int, total: int, free: int) -> None:
                try:
                    observer(OutOfMemory(device, requested, total, free))
                except Exception:
                    _log.exception("an out-of-memory observer raised; the allocation's own error follows")

            torch._C._cuda_attach_out_of_memory_observer(observed)  # type: ignore[attr-defined]
        return answer

    def shares_memory(self) -> bool:
        """True: by memory handles of the driver."""
        return True

    def share_memory(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Kind "cuda_ipc"; names the device by its UUID, since processes may count devices differently."""
        storage: Any = tensor.untyped_storage()
        device, handle, size, start, counter, counter_start, event, waits = storage._share_cuda_()
        # Torch keeps exported memory until one reader has opened and dropped it: for ever, if the reader dies. So this
        # count is ended at once, and readers count elsewhere (it is unsigned: below 0 it never ends).
        torch.UntypedStorage._release_ipc_counter_cuda(counter, counter_start)
        return {
            "kind": "cuda_ipc",
            "device": str(torch.cuda.get_device_properties(device).uuid),
            "handle": _to_text(handle),
            "storage": [size, start],
            "event": [_to_text(event), bool(waits)],
            "start": tensor.storage_offset() * tensor.element_size(),
            "num_bytes": tensor.numel() * tensor.element_size(),
        }

    def open_memory(self, handle: Mapping[str, Any]) -> torch.Tensor:
        """Kind "cuda_ipc"."""
        if handle.get("kind") != "cuda_ipc":
            return super().open_memory(handle)
        try:
            device = _index_of(handle["device"])
            (size, start), (event, waits) = handle["storage"], handle["event"]
            counter, counter_start = self._counter()
            storage = torch.UntypedStorage._new_shared_cuda(
                device,
                _from_text(handle["handle"]),
                int(size),
                int(start),
                counter,
                counter_start,
                _from_text(event),
                bool(waits),
            )
            data = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", device))
            return data.set_(storage, int(handle["start"]), (int(handle["num_bytes"]),), (1,))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"the memory handle cannot be opened ({str(error).splitlines()[0]}): are both processes on one "
                "machine, do both see the device, is the other one alive?"
            ) from error

    def _counter(self) -> tuple[bytes, int]:
        """A count of this process's own, which torch takes down when opened memory is dropped."""
        if self._own_counter is None:
            tensor = torch.zeros(1, device="cuda")
            storage: Any = tensor.untyped_storage()
            _, _, _, _, counter, start, _, _ = storage._share_cuda_()
            self._own_counter = tensor, counter, start
        return self._own_counter[1:]

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """From the table of datasheets, by the device's name."""
        return datasheets.peak_flops(self.device_name(), dtype)

    def _supports_bf16(self) -> Capability:
        if self.rocm:
            return Capability(True, "ROCm computes bfloat16 on every supported GPU")
        major, minor = torch.cuda.get_device_capability()
        return Capability(major >= 8, f"compute capability {major}.{minor}; bfloat16 needs 8.0")

    def _supports_ipc(self) -> Capability:
        return Capability(True, "memory handles of the driver, between processes of one host")

    def _supports_expandable_segments(self) -> Capability:
        reason = "torch decides by the ROCm version" if self.rocm else "virtual memory management of the driver"
        return Capability(True, reason)

    def _supports_oom_observer(self) -> Capability:
        ok = hasattr(torch._C, "_cuda_attach_out_of_memory_observer")
        return Capability(ok, f"this torch has {'' if ok else 'no '}hook for failed allocations")

    def _supports_triton(self) -> Capability:
        if not self.rocm:
            major, minor = torch.cuda.get_device_capability()
            if major < 8:
                return Capability(False, f"compute capability {major}.{minor}; the project's kernels need 8.0")
        return super()._supports_triton()


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _from_text(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _index_of(uuid: str) -> int:
    """Local ordinal of a device."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise ValueError(f"this process does not see the device {uuid}")


def is_available() -> Capability:
    """Whether torch sees a GPU. Counts devices through the management library, so no context starts where it
    can."""
    build = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    if torch.version.cuda is None and torch.version.hip is None:
        return Capability(False, f"torch {torch.__version__} was built without CUDA and ROCm")
    count = torch.cuda.device_count()
    variables = ROCM_VARIABLES if torch.version.hip else NVIDIA_VARIABLES
    seen = VisibleDevices.from_environment(variables, os.environ)
    if count == 0:
        return Capability(False, f"torch was built for {build} but sees no device; visible: {seen}")
    return Capability(True, f"{count} device(s), {build}; visible: {seen}")


def hint() -> str | None:
    """Device nodes of a GPU driver, when this build of torch cannot use them."""
    if torch.version.cuda is None and torch.version.hip is None:
        for node, vendor, build in (("/dev/nvidiactl", "NVIDIA", "CUDA"), ("/dev/kfd", "AMD", "ROCm")):
            if Path(node).exists():
                return f"an {vendor} driver is present; this torch has no {build}: install a build with it"
    return None


REGISTRATION = Registration(
    name="cuda",
    factory=CUDAAccelerator,
    is_available=is_available,
    priority=100,
    communication_backends=("nccl",),
    hint=hint,
)
