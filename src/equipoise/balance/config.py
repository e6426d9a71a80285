"""`BalanceConfig` under the name that users of the library import, and what planners get from it."""

from equipoise.balance.protocol import PlannerSettings
from equipoise.balance_config import BalanceConfig


def planner_settings(config: BalanceConfig) -> PlannerSettings:
    """The part of the settings that planners see."""
    return PlannerSettings(
        num_slots=config.num_redundant_experts_per_rank,
        tolerance=config.tolerance,
        min_tokens=config.min_tokens,
        domain_size=config.domain_size,
        copy_tokens=config.copy_tokens,
    )


__all__ = ["BalanceConfig", "planner_settings"]
