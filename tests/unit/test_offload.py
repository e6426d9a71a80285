"""Moments in host memory: the same numbers as without, nothing but a few buckets of them on the device."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from equipoise.accelerator import CPUAccelerator
from equipoise.train.offload import OffloadedAdamW
from equipoise.train.optimizer import OptimizerConfig, build_optimizer

OPTIONS: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1}


def parameters() -> list[nn.Parameter]:
    """Sizes that fill buckets unevenly; an empty one, a scalar, one that never gets a gradient."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(5, 3), (40,), (1,), (), (0, 4), (7,), (64, 2)]
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


def give_gradients(values: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for number, value in enumerate(values):
        gradient = torch.randn(value.shape, generator=generator)
        value.grad = None if number == 5 else gradient


def groups(values: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": values[:4], "weight_decay": 0.3}, {"params": values[4:]}]


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_the_numbers_are_those_of_adamw(bucket_bytes: int) -> None:
    ours, theirs = parameters(), parameters()
    offloaded = OffloadedAdamW(groups(ours), CPUAccelerator(), bucket_bytes, **OPTIONS)
    plain = torch.optim.AdamW(groups(theirs), **OPTIONS)
    for step in range(4):
        for values, optimizer in ((ours, offloaded), (theirs, plain)):
            give_gradients(values, step)
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for a, b in zip(ours, theirs, strict=True):
        assert offloaded.state[a].keys() == plain.state[b].keys()
        assert all(torch.equal(offloaded.state[a][slot], plain.state[b][slot]) for slot in plain.state[b])
    assert len(offloaded.param_groups) == (7 if bucket_bytes == 1 else 5 if bucket_bytes == 200 else 2)


def test_moments_keep_their_memory_on_the_host_and_are_updated_elsewhere() -> None:
    values = parameters()
    optimizer = OffloadedAdamW(groups(values), CPUAccelerator(), 200, **OPTIONS)
    give_gradients(values, 0)
    optimizer.step()
    home = optimizer.state[values[0]]["exp_avg"].data_ptr()
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *args: seen.append(optimizer.state[values[0]]["exp_avg"].data_ptr()))
    give_gradients(values, 1)
    optimizer.step()
    assert optimizer.state[values[0]]["exp_avg"].data_ptr() == home
    assert any(pointer != home for pointer in seen)


def test_a_state_that_is_loaded_stays_where_it_is() -> None:
    values = parameters()
    optimizer = OffloadedAdamW(groups(values), CPUAccelerator(), 200, **OPTIONS)
    give_gradients(values, 0)
    optimizer.step()
    state = optimizer.state_dict()
    want = optimizer.state[values[0]]["exp_avg"].clone()
    other = OffloadedAdamW(groups(values), CPUAccelerator(), 200, **OPTIONS)
    other.load_state_dict(state)
    assert other.state[values[0]]["exp_avg"].data_ptr() == optimizer.state[values[0]]["exp_avg"].data_ptr()
    assert torch.equal(other.state[values[0]]["exp_avg"], want)
    assert other.state[values[0]]["step"] == 1
    assert values[5] not in other.state
    moment = other.new_state(values[6], torch.float64)
    assert moment.shape == (64, 2)
    assert moment.dtype == torch.float64
    assert not moment.any()


def test_on_cpu_the_setting_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        optimizer = build_optimizer(nn.Linear(2, 2), OptimizerConfig(offload=True), CPUAccelerator())
    assert type(optimizer) is torch.optim.AdamW
    assert "optimizer.offload is on, but parameters and moments are in host memory already" in caplog.text
