"""The engine's processes as one: rank 0 says what is done, every rank does it, rank 0 learns what came of it."""

import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from equipoise.distributed.agree import gather_json
from equipoise.distributed.collectives import group_device
from equipoise.distributed.watch import describe
from equipoise.errors import EquipoiseError

logger = logging.getLogger(__name__)

Execute = Callable[[str, dict[str, Any]], Any]
STOP = "stop"


class Refused(EquipoiseError):  # noqa: N818 - reads as a sentence
    """What was asked for cannot be done as things are; nothing was changed."""


class RanksError(EquipoiseError):
    """A command failed on some rank; `errors` has what each rank says, None where it succeeded."""

    def __init__(self, errors: list[str | None]) -> None:
        self.errors = errors
        said = {text: rank for rank, text in reversed(list(enumerate(errors))) if text is not None}
        where = len(errors) > 1
        super().__init__("; ".join(f"engine rank {rank}: {text}" if where else text for text, rank in said.items()))


class Ranks:
    """Commands and results are JSON. `execute` runs a command on this rank; what it raises is a result too."""

    def __init__(self, execute: Execute, group: dist.ProcessGroup | None = None) -> None:
        self._execute, self._group = execute, group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else group.size()
        self._lock = threading.Lock()
        self._is_over = False

    def run(self, command: str, /, **arguments: Any) -> list[Any]:
        """On rank 0: every rank's result, by rank. Raises RanksError if any failed."""
        with self._lock:
            if self._group is not None:
                self._send(json.dumps([command, arguments]).encode())
            return self._results(command, arguments)

    def follow(self) -> None:
        """On the others: does what rank 0 says until it says stop."""
        while True:
            name, arguments = json.loads(self._receive())
            if name == STOP:
                return
            try:
                self._results(name, arguments)
            except RanksError:
                continue  # rank 0 has it too

    def stop(self) -> None:
        """On rank 0: lets the others return. Nothing can be run after it; twice is harmless."""
        is_first, self._is_over = not self._is_over, True
        if self._group is not None and is_first:
            with self._lock:
                self._send(json.dumps([STOP, {}]).encode())

    def give_up(self) -> None:
        """The others cannot be reached any more: `stop` will not try."""
        self._is_over = True

    def _results(self, name: str, arguments: dict[str, Any]) -> list[Any]:
        try:
            mine = [None, self._execute(name, arguments)]
        except EquipoiseError as error:
            mine = [str(error), None]
        except Exception as error:
            logger.exception("%s failed", name)
            mine = [describe(error), None]
        everyone = [mine] if self._group is None else gather_json(mine, self._group)
        errors = [error for error, _ in everyone]
        if any(error is not None for error in errors):
            raise RanksError(errors)
        return [result for _, result in everyone]

    def _send(self, data: bytes) -> None:
        assert self._group is not None
        device = group_device(self._group)
        dist.broadcast(torch.tensor([len(data)], device=device), group_src=0, group=self._group)
        dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), group_src=0, group=self._group)

    def _receive(self) -> bytes:
        assert self._group is not None
        device = group_device(self._group)
        length = torch.zeros(1, dtype=torch.int64, device=device)
        dist.broadcast(length, group_src=0, group=self._group)
        data = torch.zeros(int(length), dtype=torch.uint8, device=device)
        dist.broadcast(data, group_src=0, group=self._group)
        return bytes(data.cpu().numpy().tobytes())
