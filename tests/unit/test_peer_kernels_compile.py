"""Kernels that work in peers' memory compile for a GPU, in the forms that run there, and access 16 bytes at a time."""

import importlib.util
import os
import subprocess
import sys

import pytest

COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def build(kernel, types, capability=90, **fixed):
    missing = [name for name in kernel.arg_names if name not in types and name not in fixed]
    assert not missing, missing
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    aligned = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n, t in types.items() if t.startswith("*")}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})

def compile(kernel, types, **fixed):
    return build(kernel, types, **fixed).asm["ptx"]

group = {"control_ptr": "*i64", "pads_ptr": "*i64", "channel": "i32", "rank": "i32"}
piece = group | {"piece": "i32", "pieces_ptr": "*i64", "piece_bytes": "i64"}
two = dict(P=2, P_PAD=2)
"""
TRANSFER = """
from equipoise.kernels.transfer_triton import transfer_kernel

types = group | {"slot_expert_ptr": "*i32", "address": "i64", "table_ptr": "*i64", "slots_ptr": "*i64",
                 "expert_bytes": "i32", "num_steps": "i32", "first_slot": "i32", "end_slot": "i32"}
slots = two | dict(M=4, R=2, S=4, S_PAD=4, BLOCK=4096)
push = slots | dict(IS_PULL=False)
pull = slots | dict(IS_PULL=True, SLOT_DTYPE=tl.float32, SLOT_ITEM_BYTES=4)
long, word = (dict(DTYPE=t, SLOT_DTYPE=t, SLOT_ITEM_BYTES=n) for t, n in ((tl.int64, 8), (tl.int32, 4)))
"""
TRANSFERS = """
pointers = dict(DESC=False, STAGES=4, sources=None, gradients=None)
for table in (False, True):
    aligned = dict(STEP=16, IS_TABLE=table, ALIGNED=True)
    ptx = compile(transfer_kernel, types, **aligned, **push, **long, **pointers)
    assert "cp.async.cg.shared.global" in ptx and "st.global.v2.b64" in ptx, "blocks on their way, 16 bytes at a time"
    described = types | {"sources": "tensordesc<i32[1,1,64,64]>"}
    ptx = compile(transfer_kernel, described, **aligned, **push, **word, DESC=True, STAGES=8, gradients=None)
    assert ptx.count("cp.async.bulk.tensor") == 8 and "st.global.v4.b32" in ptx, "as many blocks on their way"
    for dtype, name, stages in ((tl.bfloat16, "bf16", 8), (tl.float32, "fp32", 6)):
        ptx = compile(transfer_kernel, types, DTYPE=dtype, **aligned, **pull, **pointers)
        assert "cp.async.cg.shared.global" in ptx and "st.global.v4.b32" in ptx
        described = types | {"sources": "tensordesc<fp32[1,1,64,64]>", "gradients": f"tensordesc<{name}[1,1,64,64]>"}
        ptx = compile(transfer_kernel, described, DTYPE=dtype, **aligned, **pull, DESC=True, STAGES=stages)
        assert ptx.count("cp.async.bulk.tensor") == 2 * stages and "st.global.v4.b32" in ptx
        assert "fence.proxy.async" in ptx, "descriptors see what the peer has written"
short = dict(DTYPE=tl.int16, SLOT_DTYPE=tl.int16, SLOT_ITEM_BYTES=2)
compile(transfer_kernel, types, STEP=1, IS_TABLE=False, ALIGNED=False, **push, **short, **pointers)
"""
FITTING = """
import torch
from equipoise.kernels import grouped_launch_triton, peers

grouped_launch_triton.has_descriptors = lambda device: True
grouped_launch_triton.num_multiprocessors = lambda device: 132
aligned = dict(STEP=16, IS_TABLE=False, ALIGNED=True, DESC=True, capability=120)
experts = peers._Experts(0, 1 << 20, None, peers.Words("int64", 8, True))
for shared, described in ((232448, [True, True, True]), (101376, [True, False, False])):  # of Hopper, of workstations
    peers._shared_memory = lambda device: shared
    kinds = ((8, tl.int32, "i32"), (2, tl.bfloat16, "bf16"), (4, tl.float32, "fp32"))
    found = [peers._Moves.of(torch.device("cuda", 0), experts, n, name != "i32", 0) for n, _, name in kinds]
    assert [moves.described for moves in found] == described, found
    for moves, (_, dtype, name) in zip(found, kinds):
        given = dict(gradients=None) | push | word if name == "i32" else dict(DTYPE=dtype) | pull
        blocks = types | {"sources": f"tensordesc<{'i32' if name == 'i32' else 'fp32'}[1,1,64,64]>"}
        blocks |= {} if name == "i32" else {"gradients": f"tensordesc<{name}[1,1,64,64]>"}
        if moves.described:
            needed = build(transfer_kernel, blocks, STAGES=moves.stages, **aligned, **given).metadata.shared
            assert needed <= shared, (name, needed)
"""
ROWS = """
from equipoise.kernels import rows_triton as rows

own = dict(L=18, K=4)
words = dict(W=1024, WORD=tl.int64, BLOCK=1024)
features = own | two | dict(D=4096, ITEM_BYTES=2, ALIGNED=True, BLOCK=4096)
layout = {"layout_ptr": "*i64"}
for integers in ("*i32", "*i64"):
    types = piece | layout | {"x_ptr": "*bf16", "send_ptr": integers, "ids_ptr": integers, "row_ptr": "*i32",
                              "quota_ptr": "*i32", "before_ptr": "*i32", "num_tokens": "i32", "capacity": "i32",
                              "record_offset": "i64", "weight_offset": "i64", "weights_ptr": "*fp32"}
    fixed = own | two | words | dict(SENDS_ALL=False, J=36, J_PAD=64, L_PAD=32, BLOCK_T=32, WORD_BYTES=8, ALIGNED=True)
    compile(rows.send_rows_kernel, types, HAS_WEIGHTS=True, **fixed)
    ptx = compile(rows.send_rows_kernel, types, HAS_WEIGHTS=False, **fixed)
    assert "ld.global.v2.b64" in ptx and "st.global.v2.b64" in ptx
    types = group | {"tables_ptr": "*i64", "counts_ptr": integers, "quota_ptr": "*i32", "before_ptr": "*i32"}
    compile(rows.exchange_counts_kernel, types, J=36, J_PAD=64, **two)
types = layout | {"rows_ptr": "*bf16", "record_ptr": "*i32", "weights_ptr": "*i32"}
ptx = compile(rows.spread_rows_kernel, types, HAS_WEIGHTS=False, **own, **words)
assert "ld.global.v2.b64" in ptx and "st.global.v2.b64" in ptx
types |= {"weights_ptr": "*fp32"}
ptx = compile(rows.spread_rows_kernel, types, W=4096, WORD=None, HAS_WEIGHTS=True, BLOCK=4096, **own)
assert "st.global.v4.b32" in ptx
types = layout | {"rows_ptr": "*bf16", "record_ptr": "*i32"}
ptx = compile(rows.fold_rows_kernel, types, L=18, K=4, D=4096, BLOCK=4096)
assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
types = layout | {"rows_ptr": "*bf16", "out_ptr": "*bf16"}
assert "st.global.v2.b64" in compile(rows.copy_rows_kernel, types, L=18, **words)
types = piece | layout | {"grad_ptr": "*bf16", "rows_ptr": "*bf16", "weights_ptr": "*fp32",
                          "grad_weights_ptr": "*fp32", "num_tokens": "i32", "weight_offset": "i64"}
for has_weights, want in ((True, True), (True, False), (False, False)):
    ptx = compile(rows.send_gradients_kernel, types, HAS_WEIGHTS=has_weights, WANT_WEIGHTS=want, **features)
    assert "st.global.v4.b32" in ptx
types = piece | layout | {"weights_ptr": "*fp32", "kept_ptr": "*bf16", "taken_ptr": "*fp32", "out_ptr": "*bf16",
                          "num_tokens": "i32", "weight_offset": "i64"}
for has_weights, keeps, takes, folded in ((True, True, False, False), (False, False, False, False),
                                          (False, False, True, False), (False, False, True, True),
                                          (False, False, False, True)):
    ptx = compile(rows.gather_rows_kernel, types, HAS_WEIGHTS=has_weights, KEEPS_ROWS=keeps, TAKES_WEIGHTS=takes,
                  FOLDED=folded, **features)
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
"""
PLAN = """
from equipoise.kernels.plan_triton import plan_kernel

names = ("load", "rules", "steps", "slot_expert", "quota", "send", "recv", "before", "total")
types = {f"{name}_ptr": "*i32" for name in names}
types |= {f"{name}_ptr": "*i64" for name in ("workspace", "control", "pads", "tables")}
types |= {n: "i32" for n in ("channel", "rank", "tolerance_ppm", "min_tokens", "copy_tokens", "num_targets")}
fixed = dict(NUM_VARIANTS=6, LANES=True, P_PAD=32, LOCALS=2, RANK_BITS=5, SLOT_BITS=2, R=2,
             HAS_EXCHANGE=True)
small = dict(P=2, E=32, DOMAIN=2, OWN_SUMS=True, HAS_COPY_TIME=False, M_PAD=16, PARTS=9, S_PAD=4, MASTER_BITS=4)
large = dict(P=8, E=256, DOMAIN=8, OWN_SUMS=False, HAS_COPY_TIME=True, M_PAD=32, PARTS=17, S_PAD=16, MASTER_BITS=5)
for size in (small, large):
    ptx = compile(plan_kernel, types, E_PAD=size["E"], **fixed, **size)
    assert "atom.global.sys.release.exch" in ptx and "sys.acquire" in ptx
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "program",
    [TRANSFER + TRANSFERS, TRANSFER + FITTING, ROWS, PLAN],
    ids=["transfers", "transfers in the shared memory of a device", "rows", "plan with exchange"],
)
def test_they_compile(program: str, tmp_path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run([sys.executable, "-c", COMPILE + program], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
