"""Datasheet rates by device name; a device that is not known gives None rather than a guess."""

import pytest
import torch

from equipoise.accelerator.peak_flops import peak_flops


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_known_devices(name: str, tera: float) -> None:
    assert peak_flops(name, torch.bfloat16) == pytest.approx(tera * 1e12)
    assert peak_flops(name, torch.float16) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Some GPU",
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "GB2000",
    ],
)
def test_unknown_devices_and_slices(name: str) -> None:
    assert peak_flops(name, torch.bfloat16) is None


def test_float32_follows_the_matmul_precision() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert peak_flops("NVIDIA H200", torch.float32) == pytest.approx(494.7e12)
        torch.set_float32_matmul_precision("highest")
        assert peak_flops("NVIDIA H200", torch.float32) == pytest.approx(66.9e12)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("name", "dtype"), [("Tesla V100-SXM2-16GB", torch.bfloat16), ("NVIDIA H200", torch.int8)])
def test_a_type_without_a_figure(name: str, dtype: torch.dtype) -> None:
    assert peak_flops(name, dtype) is None
