"""AdamW whose moments lie in host memory and visit the device a bucket of parameters at a time."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from equipoise.accelerator import Accelerator, Event
from equipoise.accelerator.pinned import host_empty_like
from equipoise.distributed.local import local_part

BUCKET_BYTES = 256 << 20
"""Bytes of moments that visit the device together; up to three such buckets are there at a time."""


class OffloadedAdamW(torch.optim.AdamW):
    """The same numbers as `torch.optim.AdamW`. Both moments lie in (pinned) host memory between steps: 8 bytes less on
    the device for each parameter in FP32, for two copies of them over the bus in each step.

    A step goes through its buckets in order. On streams of their own, one for each direction of the bus, the moments of
    the next bucket come while one is updated and those of the one before go back. Step counts stay on the device.

    `groups`: parameter groups; each is split into buckets of about `bucket_bytes` of moments on this rank, which
    become the optimizer's `param_groups`. Changes of the moments are finished for the host once the device is
    synchronized.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        accelerator: Accelerator,
        bucket_bytes: int = BUCKET_BYTES,
        **options: Any,
    ) -> None:
        buckets = [
            {**group, "params": bucket} for group in groups for bucket in _buckets(list(group["params"]), bucket_bytes)
        ]
        super().__init__(buckets, **options)
        self._accelerator = accelerator
        self._arriving, self._leaving = accelerator.new_stream(), accelerator.new_stream()

    def new_state(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A moment of zeros in host memory, laid out like `parameter`; a DTensor for a DTensor."""
        moment = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        local = local_part(moment)
        local.data = host_empty_like(local).copy_(local)
        return moment

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of all parameters that have a gradient. Takes no closure."""
        groups = self.param_groups
        coming = deque([self._fetch(groups[0])])
        leaving: deque[_Moved] = deque()
        try:
            for number, group in enumerate(groups):
                if number + 1 < len(groups):
                    coming.append(self._fetch(groups[number + 1]))
                arrived = coming.popleft()
                arrived.done.wait()
                self.param_groups = [group]
                super().step()
                leaving.append(self._send_home(group, arrived.homes))
                if len(leaving) > 1:
                    leaving.popleft().done.wait()  # only then may its device memory be used again
            while leaving:
                leaving.popleft().done.wait()
        finally:
            self.param_groups = groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the base class, which would move moments to the device; they are kept on the host."""
        counts: dict[int, dict[str, torch.Tensor]] = {}
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for index, slots in state_dict["state"].items():
            moments[index] = {slot: value for slot, value in slots.items() if value.numel() > 1}
            counts[index] = {slot: value for slot, value in slots.items() if value.numel() <= 1}
        super().load_state_dict({**state_dict, "state": counts})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, slots in moments.items():
            for moment in slots.values():
                local = local_part(moment)
                if local.device.type != "cpu":
                    local.data = host_empty_like(local).copy_(local)
            self.state[parameters[index]].update(slots)

    def _fetch(self, group: dict[str, Any]) -> "_Moved":
        """Starts to copy the moments of a bucket to the device."""
        homes: dict[int, torch.Tensor] = {}
        visitors = []
        for parameter, local in self._moments(group):
            homes[id(local)] = local.data
            visitors.append((local, torch.empty_like(local, device=local_part(parameter).device)))
        allocated = self._accelerator.event()
        allocated.record()
        allocated.wait(self._arriving)  # their memory may have been in use until here
        with self._accelerator.use_stream(self._arriving):
            for local, visitor in visitors:
                local.data = visitor.copy_(local, non_blocking=True)
        return self._moved(self._arriving, homes, [])

    def _send_home(self, group: dict[str, Any], homes: dict[int, torch.Tensor]) -> "_Moved":
        """Starts to copy the moments of an updated bucket back; new ones get a home."""
        updated = self._accelerator.event()
        updated.record()
        updated.wait(self._leaving)
        visitors = []
        with self._accelerator.use_stream(self._leaving):
            for _, local in self._moments(group):
                home = homes.get(id(local))
                if home is None:
                    home = host_empty_like(local)
                visitors.append(local.data)
                local.data = home.copy_(local, non_blocking=True)
        return self._moved(self._leaving, homes, visitors)

    def _moved(self, stream: Any, homes: dict[int, torch.Tensor], visitors: list[torch.Tensor]) -> "_Moved":
        done = self._accelerator.event()
        done.record(stream)
        return _Moved(homes, visitors, done)

    def _moments(self, group: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters of a bucket that have a gradient, each with the local tensors of its moments."""
        return [
            (parameter, local_part(value))
            for parameter in group["params"]
            if parameter.grad is not None
            for value in self.state.get(parameter, {}).values()
            if value.numel() > 1
        ]


class _Moved(NamedTuple):
    """Copies under way: host tensors by id of the local tensor, device memory to be kept until then, and the end."""

    homes: dict[int, torch.Tensor]
    visitors: list[torch.Tensor]
    done: Event


@torch.no_grad()
def _buckets(parameters: list[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Parameters in order, in parts whose moments on this rank, both in FP32, have about `bucket_bytes`."""
    part: list[torch.Tensor] = []
    size = 0
    for parameter in parameters:
        num_bytes = 8 * local_part(parameter).numel()
        if part and size + num_bytes > bucket_bytes:
            yield part
            part, size = [], 0
        part.append(parameter)
        size += num_bytes
    if part:
        yield part
