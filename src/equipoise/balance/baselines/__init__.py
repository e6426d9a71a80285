"""Published ways to balance, behind the planner protocol, for comparison only. Each file names its source."""

from equipoise.balance.baselines.llep import LeastLoadedPlanner
from equipoise.balance.baselines.replicas import EqualSplitPlanner, HistoryPlanner, NoPlanner
from equipoise.balance.baselines.ultraep import UltraEPPlanner

__all__ = ["EqualSplitPlanner", "HistoryPlanner", "LeastLoadedPlanner", "NoPlanner", "UltraEPPlanner"]
