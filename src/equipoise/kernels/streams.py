"""What kernels that work across GPUs need to know of the devices and their streams."""

import contextlib
from collections.abc import Iterator

import torch


def synchronize(device: torch.device) -> None:
    """Waits for all that was launched on the device; for setup only."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured in a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class SideStream:
    """Work beside the current stream, which goes first where both have work. On a CPU everything runs at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextlib.contextmanager
    def after_current(self, done: list[torch.Event]) -> Iterator[None]:
        """Launches go here, after all that the current stream holds. Appends the event at their end."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
            done.append(self._stream.record_event())

    @staticmethod
    def join(done: torch.Event) -> None:
        """The current stream goes on after the event."""
        torch.cuda.current_stream().wait_event(done)


def peer_problem(num_ranks: int) -> str | None:
    """None if the current GPU reaches all others of this host directly and there is one for each rank, else why not."""
    number = torch.cuda.device_count()
    if num_ranks > number:
        return f"{num_ranks} ranks share {number} visible GPUs of this host"
    here = torch.cuda.current_device()
    apart = [i for i in range(number) if i != here and not torch.cuda.can_device_access_peer(here, i)]
    return f"GPU {here} does not reach GPU {apart[0]} directly" if apart else None
