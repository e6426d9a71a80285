"""How the work of a launch is shared by the levels of its programs."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from equipoise.kernels.grouped_gemm_triton import share_of_level
from equipoise.kernels.triton_support import triton_problem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = pytest.mark.skipif(triton_problem(DEVICE.type) is not None, reason=str(triton_problem(DEVICE.type)))


@triton.jit(do_not_specialize=["lanes", "slices"])
def _shares_kernel(work_ptr, shares_ptr, lanes, slices):
    start, end = share_of_level(tl.load(work_ptr), lanes, slices)
    tl.store(shares_ptr + 2 * tl.program_id(0), start)
    tl.store(shares_ptr + 2 * tl.program_id(0) + 1, end)


@pytest.mark.parametrize("work", [0, 1, 2, 3, 7, 61, 1000, 2**31 - 16])
@pytest.mark.parametrize(("levels", "slices"), [(1, 1), (1, 8), (2, 1), (5, 4), (12, 8), (12, 3)])
def test_levels_share_all_of_the_work_and_none_of_it_twice(work: int, levels: int, slices: int) -> None:
    """Whatever work the levels were made for: the device knows less than the host's bound, and more than nothing."""
    lanes = 2
    shares = torch.full((levels, lanes, 2), -1, device=DEVICE)
    _shares_kernel[(levels * lanes,)](torch.tensor([work], dtype=torch.int32, device=DEVICE), shares, lanes, slices)
    assert torch.equal(shares[:, 0], shares[:, 1]), "lanes of a level have one share"
    found = shares[:, 0].tolist()
    assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == work
    assert all(0 <= end - start <= -(-work // slices) for start, end in found[:-1])
