"""Only the accelerator layer and kernel leaf files may name a vendor's torch namespace."""

import re
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src" / "equipoise"
ALLOWED = ("accelerator", "kernels")
VENDOR_CALL = re.compile(r"torch\.(cuda|musa|xpu|npu|mps|hpu)\b|from torch import cuda|[\w)\]]\.cuda\(")


def vendor_calls(text: str) -> list[str]:
    """Lines that name a vendor's namespace or move a tensor to it."""
    return [line.strip() for line in text.splitlines() if VENDOR_CALL.search(line)]


@pytest.mark.parametrize(
    "path",
    [p for p in sorted(SRC.rglob("*.py")) if p.relative_to(SRC).parts[0] not in ALLOWED],
    ids=lambda p: str(p.relative_to(SRC)),
)
def test_no_vendor_namespace_outside_the_accelerator_layer(path: Path) -> None:
    assert vendor_calls(path.read_text()) == []


@pytest.mark.parametrize("line", ["torch.cuda.synchronize()", "from torch import cuda", "x = x.cuda()", "torch.musa.x"])
def test_the_search_finds_vendor_calls(line: str) -> None:
    assert vendor_calls(line) == [line]


@pytest.mark.parametrize("line", ["Moves with `.to(device)` and `.cuda()`.", "torch.cudnn", "device.type"])
def test_the_search_leaves_other_text_alone(line: str) -> None:
    assert vendor_calls(line) == []
