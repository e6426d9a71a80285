"""What the planner searches: rules for moving quotas, targets to move them towards, and the order of the results.

One definition for every form of the planner. A candidate is a rule (variant) run towards a target load. Its score is

    max(its largest rank load, its target) + copy_tokens * the most copies that one rank sends or receives

The lowest score wins, then the lowest target, then the fewest copies, then the first variant; moving nothing has the
score max(input's largest rank load, tolerated load) and wins every tie. So no plan makes the largest rank load grow,
and since a score is at least its target, targets that cannot win any more need not be tried.
"""

from typing import NamedTuple

HUGE = 2**40
"""Above every load (int32), and small enough to add and subtract in int64."""


class Variant(NamedTuple):
    """The choices of one rule. Every choice takes the lowest index among equals.

    giver: 1 the most loaded rank gives first, -1 the least loaded of those above the target.
    receiver: "fit" the smallest sufficient room for what is to move, else the largest room; "large"; "small".
    fill: a receiver whose free slots are at most this many is filled to the target even if the giver drops below it.
        -1 stands for all R: then the pair also stays together (the alias table's rule) while the receiver's room is at
        least the least quota.

    A run ends when no rank is above the target, or with the first giver that finds no receiver for the least quota.
    """

    giver: int
    receiver: str
    fill: int


VARIANTS = (
    Variant(1, "fit", 0),
    Variant(1, "fit", 1),
    Variant(-1, "fit", 1),
    Variant(1, "large", -1),
    Variant(1, "small", 1),
    Variant(-1, "small", 1),
)


def _target_steps(count: int) -> list[int]:
    """Rises of the target over the lowest one in 2**-20: fine at first, then each 0.4 % above the one before."""
    steps = [0, 2**9, 2**10, 2**11, 3 * 2**10]
    while len(steps) < count:
        steps.append(steps[-1] + ((2**20 + steps[-1]) >> 8))
    return steps


TARGET_STEPS = _target_steps(128)
"""Target 0 is the tolerated load; target k > 0 is `start + (start * TARGET_STEPS[k - 1] >> 20)`, where `start` is the
larger of the tolerated load and the lower bound of `balance/bounds.py`."""

TARGET_BITS, COPIES_BITS, VARIANT_BITS = 8, 16, 3
MAX_COPIES = 2**COPIES_BITS - 1
MAX_COPY_TOKENS = 2**18
"""With these, (score, target + 1, copies, variant) fit into 63 bits; moving nothing takes 0 for the last three."""
