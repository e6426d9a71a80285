"""What each rank is doing, published in the store, and what can be concluded from it when a collective fails.

Backends report a failed collective by an address or by nothing, never by a rank. So every rank publishes a
small `Status` (host, process, current operation, a beat that advances while it lives), and a rank whose
collective failed looks up the others'. No clocks are compared between hosts: a rank is silent when its beat
stands still.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch.distributed import Store

LISTED = 8  # findings that a message spells out


@dataclass(frozen=True)
class Status:
    """One rank's published state.

    `place` identifies the host and its process namespace (empty where unknown); `beat` counts publications;
    `state` is "running", "failed" or "left"; `sequence` counts operations entered; `operation` is empty
    between operations; `seconds` is the time since the operation was entered or made progress, as of
    publication.
    """

    rank: int
    host: str
    pid: int
    place: str
    beat: int = 0
    state: str = "running"
    sequence: int = 0
    operation: str = ""
    seconds: float = 0.0
    error: str = ""

    @staticmethod
    def of_this_process(rank: int) -> "Status":
        """The status of a rank that runs in this process and has entered no operation."""
        return Status(rank, socket.gethostname(), os.getpid(), _place())

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(data: bytes) -> "Status":
        return Status(**json.loads(data))

    def where(self) -> str:
        """Rank, host and process, for a message."""
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    def doing(self) -> str:
        """The operation and its age, for a message."""
        if not self.operation:
            return "between operations"
        return f'in "{self.operation}" for {self.seconds:.1f} s'


class Board:
    """The published statuses. `store` is a connection of its own: one that blocks, blocks all its users."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def publish(self, status: Status) -> None:
        self._store.set(f"status/{status.rank}", status.encode())

    def read(self, ranks: Sequence[int]) -> list[Status]:
        """The statuses of ranks that have published before."""
        return [Status.decode(data) for data in self._store.multi_get([f"status/{rank}" for rank in ranks])]

    def publish_failure(self, status: Status) -> None:
        """Publishes a failed state, and keeps it apart if it is the run's first."""
        self.publish(status)
        if self._store.add("failures", 1) == 1:
            self._store.set("first_failure", status.encode())

    def share(self, find: Callable[[], str], by: str, seconds: float) -> str:
        """What the first caller of all ranks finds; the others wait for it, up to `seconds`."""
        if self._store.add("shared/asked", 1) == 1:
            self._store.set("shared/by", by)
            self._store.set("shared/found", find())
        else:
            end = time.monotonic() + seconds
            while not self._store.check(["shared/found"]):
                if time.monotonic() > end:
                    return f"  no answer from {self._store.get('shared/by').decode()}, which looked it up first"
                time.sleep(0.5)
        return f"{self._store.get('shared/found').decode()}\n  (seen by {self._store.get('shared/by').decode()})"

    def first_failure(self) -> Status | None:
        """The first failure of any rank, or None."""
        if not self._store.check(["first_failure"]):
            return None
        return Status.decode(self._store.get("first_failure"))


@dataclass(frozen=True)
class Finding:
    """Why a rank does not take part. `weight` orders findings: the likely cause comes first."""

    weight: int
    text: str


def investigate(board: Board, me: Status, members: Sequence[int], patience_s: float) -> list[Finding]:
    """Finds which of `members` are missing, and why; likely causes first.

    Takes up to `patience_s`, in which a live rank must have published anew; less once all are explained.
    """
    others = [rank for rank in members if rank != me.rank]
    before = {status.rank: status for status in board.read(others)}
    end = time.monotonic() + patience_s
    while True:
        time.sleep(min(max(0.1, len(others) / 1000), patience_s / 4))
        last = time.monotonic() >= end
        after = {status.rank: status for status in board.read(others)}
        unexplained = [r for r in others if before[r].beat == after[r].beat and not _end_of(after[r], me)]
        if last or not unexplained:
            break
    found = [judge(before[rank], after[rank], me) for rank in others]
    first = board.first_failure()
    if first is not None and first.rank != me.rank and first.rank not in others:
        found.append(Finding(1, f"{first.where()}, outside this group, failed: {first.error}"))
    return sorted((f for f in found if f is not None), key=lambda f: f.weight)


def judge(before: Status, after: Status, me: Status) -> Finding | None:
    """Compares a rank's status, read twice, a patience apart, with this rank's; None if nothing is wrong."""
    where = after.where()
    if (end := _end_of(after, me)) is not None:
        return Finding(*end)
    if before.beat == after.beat:
        reason = "gives no sign of life (dead, stopped, or cut off from the network)"
        return Finding(0, f"{where} {reason}; last seen {after.doing()}")
    if after.operation != me.operation:
        order = "is late" if after.sequence < me.sequence else "is elsewhere"
        return Finding(2, f"{where} {order}: {after.doing()}")
    return None


def _end_of(status: Status, me: Status) -> tuple[int, str] | None:
    """Weight and text if the rank is known to take no further part, whatever its beat."""
    if status.state == "failed":
        consequence = status.error.startswith("RankFailure")
        return (4 if consequence else 1), f"{status.where()} failed {status.doing()}: {status.error}"
    if status.state == "left":
        return 1, f"{status.where()} has left the run"
    if status.place and status.place == me.place:
        state = _process_state(status.pid)
        if state in "XZ":
            return 0, f"{status.where()}: its process has ended; last seen {status.doing()}"
        if state in "Tt":
            stopped = "its process is stopped (by a signal or a debugger)"
            return 0, f"{status.where()}: {stopped}; last seen {status.doing()}"
    return None


def explain(findings: Sequence[Finding], members: Sequence[int]) -> str:
    """The findings as lines of a message."""
    if not findings:
        return (
            f"  all {len(members)} ranks are alive and in this operation: look for an earlier error in their "
            "logs, for a network fault between them, or for ranks that run different collectives"
        )
    lines = [f"  {finding.text}" for finding in findings[:LISTED]]
    if len(findings) > LISTED:
        lines.append(f"  and {len(findings) - LISTED} more")
    return "\n".join(lines)


def shorten_ranks(ranks: Sequence[int]) -> str:
    """Ranks with runs joined: "0-7, 12"."""
    parts: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][1] == rank - 1:
            parts[-1] = (parts[-1][0], rank)
        else:
            parts.append((rank, rank))
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts[:LISTED])
    return shown if len(parts) <= LISTED else f"{shown}, ... ({len(ranks)} ranks)"


def advance(status: Status, **changes: object) -> Status:
    """The next publication of a rank's status."""
    return replace(status, beat=status.beat + 1, **changes)  # type: ignore[arg-type]


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return ""


def _process_state(pid: int) -> str:
    """The state letter of a process of this host; "X" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
