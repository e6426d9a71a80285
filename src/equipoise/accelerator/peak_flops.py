"""Dense peak rates of known devices, from the vendors' datasheets, in TFLOP/s.

Figures with sparsity are halved. A row holds (name pattern, 16-bit tensor rate, TF32 tensor rate, FP32 rate);
the first pattern that is found in the device's name wins, so a variant stands before its family. An MI250X or
MI250 is two devices to torch: its row holds half of the board's figures. BF16 and FP16 are equal unless
`_FP16_ONLY` matches. GeForce rows hold the rate with FP32 accumulation.
"""

from __future__ import annotations

import re

import torch

_TERA = 1e12

_ROWS: tuple[tuple[str, float, float | None, float], ...] = (
    (r"GB300", 2500.0, 1250.0, 80.0),
    (r"B300", 2250.0, 1125.0, 75.0),
    (r"GB200", 2500.0, 1250.0, 80.0),
    (r"B200", 2250.0, 1125.0, 75.0),
    (r"H200 NVL", 835.5, 417.5, 60.0),
    (r"GH200|H200", 989.4, 494.7, 66.9),
    (r"H100 NVL", 835.5, 417.5, 60.0),
    (r"H100 PCIe", 756.0, 378.0, 51.0),
    (r"H100|H800", 989.4, 494.7, 66.9),
    (r"H20\b", 148.0, 74.0, 44.0),
    (r"A100|A800", 312.0, 156.0, 19.5),
    (r"A40\b", 149.7, 74.8, 37.4),
    (r"A30\b", 165.0, 82.0, 10.3),
    (r"A10\b", 125.0, 62.5, 31.2),
    (r"RTX A6000", 154.8, 77.4, 38.7),
    (r"RTX 6000 Ada", 364.2, 182.1, 91.1),
    (r"L40S", 362.05, 183.0, 91.6),
    (r"L40\b", 181.05, 90.5, 90.5),
    (r"L4\b", 121.0, 60.0, 30.3),
    (r"RTX 5090(?! (D|Laptop))", 209.5, 104.8, 104.8),
    (r"RTX 4090(?! (D|Laptop))", 165.2, 82.6, 82.6),
    (r"RTX 3090(?! Ti)", 71.0, 35.6, 35.6),
    (r"V100-SXM", 125.0, None, 15.7),
    (r"V100-PCIE", 112.0, None, 14.0),
    (r"T4\b", 65.0, None, 8.1),
    (r"MI355X", 2516.6, None, 157.3),
    (r"MI350X", 2306.9, None, 144.2),
    (r"MI300X|MI325X", 1307.4, 653.7, 163.4),
    (r"MI300A", 980.6, 490.3, 122.6),
    (r"MI250X", 191.5, None, 47.9),
    (r"MI250\b", 181.05, None, 45.3),
    (r"MI210", 181.0, None, 45.3),
)
_FP16_ONLY = re.compile(r"V100|T4\b")
_SLICE = re.compile(r"\bMIG\b")


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Dense FLOP/s of `device_name` in `dtype`; None for an unknown device or dtype, and for a slice of a
    device.

    `torch.float32` gives the TF32 rate when torch's float32 matmul precision permits TF32, else the FP32
    rate.
    """
    if _SLICE.search(device_name):
        return None
    row = next((row for row in _ROWS if re.search(rf"(?<![A-Za-z0-9])(?:{row[0]})(?![0-9])", device_name)), None)
    if row is None:
        return None
    _, half, tf32, single = row
    if dtype == torch.float16 or (dtype == torch.bfloat16 and not _FP16_ONLY.search(device_name)):
        return half * _TERA
    if dtype == torch.float32:
        permitted = torch.get_float32_matmul_precision() != "highest"
        return (tf32 if permitted and tf32 is not None else single) * _TERA
    return None
