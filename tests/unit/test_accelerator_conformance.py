"""Our backends pass the conformance kit, and the kit finds a backend that is wrong."""

import subprocess
import sys

import pytest
import torch

from equipoise.accelerator import CPUAccelerator, CUDAAccelerator, MemoryStats
from equipoise.accelerator.testing import CHECKS, assert_conforms, run_check, run_checks


@pytest.mark.parametrize("check", CHECKS)
def test_the_cpu_conforms(check: str) -> None:
    outcome = run_check(check, CPUAccelerator())
    assert outcome.status == "passed", outcome.detail


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_conforms() -> None:
    """In its own process: an out-of-memory observer stays until the process ends."""
    code = (
        "from equipoise.accelerator import CUDAAccelerator\n"
        "from equipoise.accelerator.testing import assert_conforms\n"
        "assert_conforms(CUDAAccelerator())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_without_tensors_only_the_checks_that_compute_are_left_out() -> None:
    outcomes = run_checks(CPUAccelerator(), tensors=False)
    assert [o.check for o in outcomes] == list(CHECKS)
    assert {o.check for o in outcomes if o.status == "skipped"} == {n for n, c in CHECKS.items() if c.needs_tensors}


class NoReason(CPUAccelerator):
    def _supports(self, capability: str):  # type: ignore[no-untyped-def]
        return True


class ForgetsThePeak(CPUAccelerator):
    def memory(self) -> MemoryStats:
        stats = super().memory()
        return MemoryStats(stats.allocated, stats.allocated - 1, stats.reserved, stats.free, stats.total)


class SameSeed(CPUAccelerator):
    def set_rng_state(self, state: torch.Tensor) -> None:
        pass


class WrongTransport(CPUAccelerator):
    def world_backend(self) -> str:
        return "cpu:gloo,cuda:nccl"

    def communication_backend(self) -> str:
        return "xccl"


class TakesStrings(CPUAccelerator):
    def device(self, index=None) -> torch.device:  # type: ignore[no-untyped-def]
        return torch.device("cpu")


class RaisesEverywhere(CPUAccelerator):
    def current_stream(self):  # type: ignore[no-untyped-def]
        raise OSError("driver gone")


@pytest.mark.parametrize(
    ("backend", "check"),
    [
        (NoReason, "capabilities_have_reasons"),
        (ForgetsThePeak, "memory_is_counted"),
        (SameSeed, "random_numbers_repeat"),
        (WrongTransport, "transports_are_named"),
        (TakesStrings, "devices_are_local_ordinals"),
        (RaisesEverywhere, "events_and_streams_work"),
    ],
)
def test_a_wrong_backend_fails_the_check_of_its_fault(backend: type[CPUAccelerator], check: str) -> None:
    assert run_check(check, backend()).status == "failed"
    with pytest.raises(AssertionError, match=check):
        assert_conforms(backend())


def test_cuda_needs_no_gpu_to_be_made() -> None:
    accelerator = CUDAAccelerator()
    assert (accelerator.communication_backend(), accelerator.world_backend()) == (
        "nccl",
        "cpu:gloo,cuda:nccl",
    )
    assert accelerator.weight_update_backend() == "nccl"
