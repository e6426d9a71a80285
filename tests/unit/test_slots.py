"""Whose replicas are in the slots."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise.balance.runtime import _Slots


class Transport:
    """Copies a step's masters to the slots; fails at pushes that are told beforehand."""

    def __init__(self, failing: tuple[int, ...]) -> None:
        self.failing, self.pushes, self.slots = failing, 0, torch.zeros(2)

    def push_weights(self, name: str, copies: Any, masters: torch.Tensor, what: str) -> Any:
        self.pushes += 1
        if self.pushes in self.failing:
            raise RuntimeError(what)
        self.slots.copy_(masters)
        return SimpleNamespace(num_parts=1, wait=lambda part: None)


class Step:
    copies, where = None, "layer 3"

    def __init__(self, value: float) -> None:
        self.value = value

    def masters(self, name: str) -> torch.Tensor:
        return torch.full((2,), self.value)


def test_a_step_whose_push_failed_is_not_taken_for_one_in_the_slots() -> None:
    transport = Transport(failing=(2,))
    slots = _Slots(transport, SimpleNamespace(weights=lambda name: transport.slots))  # type: ignore[arg-type]
    first, second = Step(1), Step(2)
    slots.weights(first, "up")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="layer 3"):
        slots.hold(second, "up")  # type: ignore[arg-type]
    assert slots.weights(second, "up").tolist() == [2, 2]  # type: ignore[arg-type]
    transport.failing = (4,)
    with pytest.raises(RuntimeError, match="layer 3"):
        slots.hold(first, "up")  # type: ignore[arg-type]
    slots.weights(second, "up")  # type: ignore[arg-type]
    assert transport.pushes == 5, "what a failed push left of the one before is not known"
