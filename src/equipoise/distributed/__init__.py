"""The world of ranks: joining it, its meshes and process groups, failures that name who is missing."""

from equipoise.distributed.agree import gather_json, raise_together
from equipoise.distributed.collectives import all_reduce_sum
from equipoise.distributed.groups import GroupRegistry
from equipoise.distributed.parking import park, unpark
from equipoise.distributed.watch import WATCHDOG_EXIT_CODE
from equipoise.distributed.world import World, join_world

__all__ = [
    "WATCHDOG_EXIT_CODE",
    "GroupRegistry",
    "World",
    "all_reduce_sum",
    "gather_json",
    "join_world",
    "park",
    "raise_together",
    "unpark",
]
