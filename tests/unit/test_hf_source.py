"""Any region of any parameter is read as if it were cut from the whole, whatever layout and dtype the files have."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from equipoise.checkpoint.hf import export, open_source
from unit.hf_toys import deepseek_model, hf_model, save_vision_language_model

SIZES = {"num_hidden_layers": 2, "hidden_size": 136, "moe_intermediate_size": 20}


def per_expert(path: Path) -> Path:
    deepseek_model(**SIZES).save_pretrained(path / "hf", max_shard_size="50KB")
    return path / "hf"


def fused(path: Path) -> Path:
    hf_model(**SIZES).save_pretrained(path / "single")
    return export(open_source(path / "single"), path / "hf", "hf", experts="fused", shard_bytes=50_000)


def transposed(path: Path) -> Path:
    save_vision_language_model(path / "hf")
    return path / "hf"


def fp8(path: Path) -> Path:
    """Matrices of more than one block, with a rest."""
    hf_model(num_hidden_layers=1, hidden_size=136, moe_intermediate_size=260, num_experts=3).save_pretrained(path / "x")
    return export(open_source(path / "x"), path / "hf", "hf", torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16])
@pytest.mark.parametrize("make", [per_expert, fused, transposed, fp8])
def test_regions_equal_cuts_of_the_whole(
    make: Callable[[Path], Path], dtype: torch.dtype | None, tmp_path: Path
) -> None:
    source = open_source(make(tmp_path))
    draw = random.Random(0)
    for name, stored in source.tensors.items():
        whole = source.read(name, (0,) * len(stored.shape), stored.shape, dtype)
        assert (whole.dtype, tuple(whole.shape)) == (dtype or stored.dtype, stored.shape)
        assert whole.is_contiguous()
        for _ in range(6):
            start = tuple(draw.randrange(n) for n in stored.shape)
            size = tuple(draw.randint(1, n - a) for n, a in zip(stored.shape, start))
            part = source.read(name, start, size, dtype)
            assert part.is_contiguous()
            assert torch.equal(part, whole[tuple(slice(a, a + n) for a, n in zip(start, size))]), (name, start, size)
    source.close()
