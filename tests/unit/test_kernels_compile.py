"""Kernels compile for a GPU, in the forms that the interpreter, which compiles nothing, takes for working ones."""

import importlib.util
import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from equipoise.kernels.grouped_wgrad_triton import dual_wgrad_kernel as kernel

pointers = {"grad": "*bf16", "rows": "*bf16", "out_masters": "*bf16", "out_slots": "*fp32", "offsets": "*i32",
            "order": "*i32", "slot_stride": "i64", "num_experts": "i32", "M": "i32"}
fixed = dict(N=96, K=64, MASTERS=4, ADD=True, DESC=False, DESC_OUT=False, DESC_SLOTS=False, BM=64, BN=64, BT=32,
             GROUP=8, FLATTEN=False, SPLIT=False, SNAKE=False)
for share, slots in ((0, "*fp32"), (1, "*bf16"), (2, "*fp32"), (2, "*bf16")):
    types = pointers | {"out_slots": slots}  # masters stand in for slots where there are none
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in (fixed | {"SHARE": share}).items()}
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32),
                              options={"num_warps": 4, "num_stages": 2})
    assert "wgmma" in compiled.asm["ptx"]
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_weight_gradients_compile_with_and_without_slots(tmp_path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
