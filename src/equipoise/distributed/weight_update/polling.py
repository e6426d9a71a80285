"""How a side of an update waits for numbers and events that nothing announces."""

import time

import torch

POLL_S = 5e-5
EAGER_S = 2e-3
"""So long a wait for a device looks without sleeping: a bucket takes less there, and a sleep is longer than it says."""


def rest(since: float, device: torch.device) -> None:
    """Between two looks of a wait that began at `since` (time.monotonic)."""
    is_eager = device.type != "cpu" and time.monotonic() < since + EAGER_S
    time.sleep(0.0 if is_eager else POLL_S)
