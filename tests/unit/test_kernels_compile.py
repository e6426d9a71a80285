"""Kernels compile for a GPU, in the forms that the interpreter, which compiles nothing, takes for working ones."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from equipoise.kernels.grouped_gemm_triton import dual_gemm_kernel as gemm
from equipoise.kernels.grouped_wgrad_triton import dual_wgrad_kernel as wgrad

def compile(kernel, types, warps, stages, **fixed):
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    return triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32),
                          options={"num_warps": warps, "num_stages": stages})
"""
WGRAD = """
numbers = {"offsets": "*i32", "order": "*i32", "slot_stride": "i64", "M": "i32", "S": "i32",
         "lanes": "i32", "slices": "i32"}
pointers = numbers | {"grad": "*bf16", "rows": "*bf16", "out_masters": "*bf16", "out_slots": "*fp32"}
fixed = dict(N=96, K=64, E_PAD=4, ADD=True, DESC=False, DESC_OUT=False, DESC_SLOTS=False, BM=64, BN=64, BT=32,
             GROUP=8, SPLIT=0, SNAKE=False)
for masters, slots in ((True, True), (True, False), (False, True), (False, False)):
    types = dict(pointers) if slots else {k: v for k, v in pointers.items() if k != "out_slots"}
    given = fixed if slots else fixed | {"out_slots": None}
    compiled = compile(wgrad, types, 4, 2, HAS_MASTERS=masters, HAS_SLOTS=slots, **given)
    assert ("wgmma" in compiled.asm["ptx"]) == (masters or slots)
"""
SWIGLU = """
from equipoise.kernels import swiglu_triton as swiglu
types = {"hidden": "*bf16", "act": "*bf16", "grad_hidden": "*bf16", "weights": "*fp32", "grad_weights": "*fp32",
         "end_ptr": "*i32", "num_columns": "i32"}
compile(swiglu.weighted_swiglu_rows_backward_kernel, types, 4, 3, I=768, BR=4, BC=256)
compile(swiglu.swiglu_rows_kernel, types, 8, 3, I=768, WEIGHTED=True, BR=16, BC=256)
without = {name: kind for name, kind in types.items() if name != "weights"}
compile(swiglu.swiglu_rows_kernel, without, 8, 3, weights=None, I=768, WEIGHTED=False, BR=16, BC=256)
"""
PIPELINED = """
def check(compiled, stages):
    ir = compiled.asm["ttgir"]
    assert "tensormap_create" not in ir and "make_tensor_descriptor" not in ir
    loads = re.findall(r"async_tma_copy_global_to_local .*", ir)
    assert len(loads) >= 2 * stages, loads  # before the loop, and in it
    buffers = {int(n) for n in re.findall(r"local_alloc : \\(\\) -> !ttg.memdesc<(\\d+)x[\\dx]*bf16", ir)}
    assert max(buffers) == stages, buffers
    assert re.search(r"warp_group_dot .*isAsync = true", ir)

types = {"grad": "tensordesc<bf16[1, 1, 32, 128]>", "rows": "tensordesc<bf16[1, 1, 32, 128]>",
         "out_masters": "tensordesc<bf16[1, 128, 64]>", "out_slots": "tensordesc<fp32[1, 128, 32]>",
         "offsets": "*i32", "order": "*i32", "slot_stride": "i64", "M": "i32", "S": "i32",
         "lanes": "i32", "slices": "i32"}
check(compile(wgrad, types, 4, 4, N=3072, K=4096, E_PAD=16, HAS_MASTERS=True, HAS_SLOTS=True, ADD=True, DESC=True,
              DESC_OUT=True, DESC_SLOTS=True, BM=128, BN=128, BT=32, GROUP=8, SPLIT=1, SNAKE=False), 4)
for transposed in (True, False):
    weight = "tensordesc<bf16[1, 128, 64]>" if transposed else "tensordesc<bf16[1, 64, 128]>"
    types = {"x": "tensordesc<bf16[128, 64]>", "masters": weight, "slots": weight,
             "y": "tensordesc<bf16[1, 1, 128, 64]>", "offsets": "*i32", "expert_W": "*i32", "row_W": "*i32",
             "num_3": "*i32", "num_rows": "i32", "master_stride": "i64", "slot_stride": "i64", "M": "i32",
             "lanes": "i32", "slices": "i32"}
    check(compile(gemm, types, 4, 3, master_bias=None, slot_bias=None, C=4096, O=3072, TRANSPOSED=transposed,
                  HAS_MASTERS=True, HAS_SLOTS=True, HALF=0, HAS_BIAS=False, DESC=True, BM=128, BN=128, BK=64, GROUP=8,
                  FLATTEN=True, SPLIT=1), 3)
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

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run(program: str, folder: Path) -> None:
    """In a process without the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(folder)
    result = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


def test_weight_gradients_compile_with_and_without_slots(tmp_path: Path) -> None:
    run(COMPILE + WGRAD, tmp_path)


def test_activations_compile_with_and_without_weights(tmp_path: Path) -> None:
    run(COMPILE + SWIGLU, tmp_path)


def test_k10_grouped_products_are_pipelined_by_the_copy_engine(tmp_path: Path) -> None:
    """As many buffers as stages, filled by it ahead of products that nobody waits for at once."""
    run(COMPILE + PIPELINED, tmp_path)


def test_checksums_read_and_write_four_words_at_a_time(tmp_path: Path) -> None:
    run(CHECKSUMS, tmp_path)
