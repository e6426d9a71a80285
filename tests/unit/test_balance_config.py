"""The balance section of a training run: off by default, and what it refuses."""

import pytest
import torch

from equipoise.balance import BalanceConfig, Balancer
from equipoise.dispatch.config import DispatchConfig
from equipoise.errors import ConfigError
from equipoise.train.config import TrainConfig
from equipoise.train.load import load_config
from equipoise.train.record import describe_balancing
from equipoise.train.resolved import to_toml


def test_off_is_the_default_and_one_setting_switches_it_on() -> None:
    assert load_config(TrainConfig).balance is None
    config = load_config(TrainConfig, overrides=["--balance.num_redundant_experts_per_rank", "2"])
    assert config.balance is not None
    assert config.balance.num_redundant_experts_per_rank == 2
    assert "num_redundant_experts_per_rank = 2" in to_toml(config)


def test_one_rank_has_nobody_to_balance_with() -> None:
    with pytest.raises(ConfigError, match=r"parallel.ep_size is 1.*leave the balance section out"):
        load_config(TrainConfig, overrides=["--balance.tolerance", "0.02"]).check_world(2)


def test_domains_have_to_divide_the_group() -> None:
    overrides = ["--balance.domain_size", "3", "--parallel.ep_size", "4"]
    with pytest.raises(ConfigError, match=r"domain_size is 3.*ep_size 4.*\[1, 2, 4\]"):
        load_config(TrainConfig, overrides=overrides).check_world(4)


def test_the_symmetric_transport_needs_plans_on_the_device() -> None:
    overrides = ["--balance.planner", "eplb", "--balance.transport", "symmetric", "--parallel.ep_size", "2"]
    with pytest.raises(ConfigError, match=r"planner is 'eplb'.*exact_load"):
        load_config(TrainConfig, overrides=overrides).check_world(2)


def test_rows_between_domains_come_without_weights() -> None:
    overrides = ["--dispatch.weighs_rows", "true", "--parallel.domain_size", "2", "--parallel.ep_size", "4"]
    with pytest.raises(ConfigError, match=r"weighs_rows is true but parallel.domain_size 2.*ep_size 4"):
        load_config(TrainConfig, overrides=overrides).check_world(4)
    load_config(TrainConfig, overrides=overrides[:2]).check_world(4)


def test_one_rank_has_nobody_to_dispatch_to() -> None:
    with pytest.raises(ConfigError, match=r"dispatcher is 'symmetric'.*ep_size is 1.*local"):
        load_config(TrainConfig, overrides=["--parallel.dispatcher", "symmetric"]).check_world(2)


@pytest.mark.parametrize(
    ("overflow", "balanced", "factor"),
    [("auto", True, 1.5), ("auto", False, 0.0), ("error", False, 1.5), ("worst_case", True, 0.0)],
)
def test_buffers_are_bounded_where_balancing_bounds_the_load(overflow: str, balanced: bool, factor: float) -> None:
    config = DispatchConfig(capacity_factor=1.5, overflow=overflow)  # type: ignore[arg-type]
    assert config.factor(balanced) == factor


@pytest.mark.parametrize("slots", ["0", "-1"])
def test_on_without_slots_is_refused(slots: str) -> None:
    with pytest.raises(ConfigError, match="num_redundant_experts_per_rank"):
        load_config(TrainConfig, overrides=[f"--balance.num_redundant_experts_per_rank={slots}"])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
def test_experts_in_fp8_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=rf"experts in {dtype} cannot be balanced: FP8 .* leave balancing off"):
        Balancer(None, 4, {"up": (6, 2)}, dtype)


@pytest.mark.parametrize(
    ("balance", "ep_size", "told"),
    [
        (None, 1, "off"),
        (None, 2, "off (--balance turns it on)"),
        (BalanceConfig(), 2, "exact_load, 1 replica slot on each rank"),
        (BalanceConfig(num_redundant_experts_per_rank=2), 2, "exact_load, 2 replica slots on each rank"),
        (BalanceConfig(tolerance=0.99), 2, "exact_load, 1 replica slot on each rank"),
        (
            BalanceConfig(tolerance=1),  # by somebody who means 1 %
            2,
            "exact_load, 1 replica slot on each rank; balance.tolerance 1 moves nothing below 2 times the mean load "
            "(0.01 is 1 %)",
        ),
    ],
)
def test_the_log_says_what_is_balanced_and_that_a_tolerance_is_no_percentage(balance, ep_size: int, told: str) -> None:
    assert describe_balancing(balance, ep_size) == told
