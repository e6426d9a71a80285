"""Questions that all ranks of a group answer at setup, through the group's store.

Every answer carries its question. So ranks that are at different points find out, all of them, instead of waiting in
collectives that do not belong together; and a wait in vain names those who did not come.
"""

import json
import time
from collections.abc import Sequence

import torch.distributed as dist

from equipoise.distributed.collectives import Group, live_group
from equipoise.errors import ConfigError, RankFailure

_asked: dict[str, int] = {}
"""Questions asked so far, by group name: the same on all of its ranks. A group that is built again keeps its name."""


class Agreement:
    """Asks the ranks of one group, which ask the same in the same order.

    Args:
        group: any process group, or a mesh of one axis.
        timeout_s: longest wait for the others.
    """

    def __init__(self, group: Group, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s

    def gather(self, question: str, values: Sequence[int] = ()) -> list[list[int]]:
        """Every rank's values, by rank in the group.

        Raises:
            RankFailure: ranks did not come in time; they are named.
            ConfigError: ranks asked something else. On all ranks.
        """
        group = live_group(self._group)
        ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
        number = _asked[group.group_name] = _asked.get(group.group_name, 0) + 1
        store = group.get_group_store()
        key = lambda rank, number=number: f"equipoise/agreement/{number}/{rank}"  # noqa: E731
        store.set(key(me), json.dumps([question, list(values)]))
        answers: dict[int, tuple[str, list[int]]] = {}
        deadline, pause_s = time.monotonic() + self._timeout_s, 0.0005
        while True:
            for rank in range(len(ranks)):
                if rank not in answers and store.check([key(rank)]):
                    asked, given = json.loads(store.get(key(rank)))
                    answers[rank] = asked, given
            if len(answers) == len(ranks):
                break
            if time.monotonic() > deadline:
                missing = ", ".join(str(ranks[rank]) for rank in range(len(ranks)) if rank not in answers)
                raise RankFailure(
                    f"{question}: rank {ranks[me]} waited {self._timeout_s:g} s at setup for rank {missing} of the "
                    f"group {ranks}, which did not come to it"
                )
            time.sleep(pause_s)  # not a blocking read: the connection serves other threads too
            pause_s = min(2 * pause_s, 0.02)
        if number > 1:
            store.delete_key(key(me, number - 1))  # whoever is here has read it
        others = {asked for asked, _ in answers.values()}
        if len(others) > 1:
            asked_by = "; ".join(f"rank {ranks[rank]}: {answers[rank][0]}" for rank in range(len(ranks)))
            raise ConfigError(
                f"the ranks of the group {ranks} ask for different things ({asked_by}). Make the same objects with the "
                "same sizes, in the same order, on every rank"
            )
        return [answers[rank][1] for rank in range(len(ranks))]
