"""Kernels compile for a GPU, in the forms that the interpreter, which compiles nothing, takes for working ones."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

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

CHECKSUMS = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from equipoise.kernels.checksum_triton import UNIT, FACTOR, SUMMAND, cast_kernel, words_kernel

def ptx(kernel, types, fixed, warps):
    fixed = fixed | dict(UNIT=UNIT, FACTOR=FACTOR, SUMMAND=SUMMAND)
    numbers = {"first_unit": "i32", "quads": "i32", "num_words": "i32", "num_values": "i32", "total_ptr": "*i32"}
    signature = {name: (types | numbers).get(name, "constexpr") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    even = ("source_ptr", "target_ptr", "num_words", "num_values")
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in even}
    source = ASTSource(kernel, signature, constants, attrs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]

words = {"source_ptr": "*i32", "target_ptr": "*i32"}
text = ptx(words_kernel, words, {"STORE": True}, 8)
assert "ld.global.v4" in text and "st.global.v4" in text, text
text = ptx(cast_kernel, {"source_ptr": "*fp32", "target_ptr": "*bf16"}, {}, 16)
assert "ld.global.v4" in text and "st.global.v" in text, text
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_weight_gradients_compile_with_and_without_slots(tmp_path) -> None:
    run(PROGRAM, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_checksums_read_and_write_four_words_at_a_time(tmp_path) -> None:
    run(CHECKSUMS, tmp_path)


def run(program: str, folder: Path) -> None:
    """In a process without the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(folder)
    result = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
