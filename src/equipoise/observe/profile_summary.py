"""What each phase of the MoE layer costs in a Chrome trace of torch's profiler.

The named ranges of a forward are `moe.router`, `moe.plan`, `moe.push`, `moe.dispatch`, `moe.experts` and `moe.combine`;
`moe.restore` and `moe.reduce` are of the backward. The backward of the others is found through autograd's sequence
numbers: an operation of the forward and the node that undoes it carry the same one.

A step's time is divided twice, each time without remainder: on the host by what the host was doing, innermost range
first; on the device by which phases' kernels were running. Device time is exposed where one phase runs alone: while two
run at once, the one hides the other.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PHASES = ("router", "plan", "push", "dispatch", "experts", "combine", "restore", "reduce")
STEP = "train.step "
"""Begin of the name of the range around an optimizer step; its number follows."""
_BACKWARD = ">"
"""Mark of a label: the phase's backward."""
_RANGES = {f"moe.{phase}": phase + _BACKWARD * (phase in ("restore", "reduce")) for phase in PHASES}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_NODE = "autograd::engine::evaluate_function"

Interval = tuple[float, float, str]
"""Start and end in microseconds, and a label."""


@dataclass(frozen=True)
class PhaseTime:
    """Milliseconds per step: the host's in forward and backward, the device's in all and while no other phase ran."""

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    device_ms: float = 0.0
    exposed_ms: float = 0.0


@dataclass(frozen=True)
class ProfileSummary:
    """Of `steps` steps of `step_ms` each on average.

    phases: by name. other_host_ms, other_device_ms: outside of the MoE phases (attention, loss, optimizer).
    overlapped_ms: the device ran several phases at once. idle_ms: the device waited. Both 0 without a device.
    """

    steps: int
    step_ms: float
    has_device: bool
    phases: dict[str, PhaseTime] = field(default_factory=dict)
    other_host_ms: float = 0.0
    other_device_ms: float = 0.0
    overlapped_ms: float = 0.0
    idle_ms: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and numbers."""
        return asdict(self)


def flatten(intervals: Iterable[Interval]) -> list[Interval]:
    """Nested intervals as pieces that do not overlap, each with the label of the innermost; in order of time."""
    pieces: list[Interval] = []
    stack: list[tuple[float, str]] = []
    now = float("-inf")

    def close_until(time: float) -> None:
        nonlocal now
        while stack and stack[-1][0] <= time:
            end, label = stack.pop()
            if end > now:
                pieces.append((now, end, label))
                now = end

    for start, end, label in sorted(intervals, key=lambda x: (x[0], -x[1])):
        close_until(start)
        if stack:
            if start > now:
                pieces.append((now, start, stack[-1][1]))
            end = min(end, stack[-1][0])  # rounding may let a child outlast its parent
        now = max(now, start)
        stack.append((end, label))
    close_until(float("inf"))
    return pieces


def divide(
    intervals: Sequence[Interval], windows: Sequence[tuple[float, float]]
) -> tuple[dict[str, float], float, float]:
    """Exposed time of each label, time with several labels at once, and time with none, inside the windows."""
    exposed: dict[str, float] = defaultdict(float)
    overlapped = idle = 0.0
    changes = sorted(
        [(start, 1, label) for start, _, label in intervals] + [(end, -1, label) for _, end, label in intervals]
    )
    for first, last in windows:
        active: Counter[str] = Counter()
        now, position = first, 0
        while True:
            time = min(changes[position][0], last) if position < len(changes) else last
            if time > now:
                running = [label for label, count in active.items() if count]
                if len(running) == 1:
                    exposed[running[0]] += time - now
                elif running:
                    overlapped += time - now
                else:
                    idle += time - now
                now = time
            if position == len(changes) or changes[position][0] >= last:
                break
            active[changes[position][2]] += changes[position][1]
            position += 1
    return exposed, overlapped, idle


class _Host:
    """Labelled pieces of the host's threads: (phase, is it the backward)."""

    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        forward: dict[Any, list[Interval]] = defaultdict(list)
        for event in events:
            if event.get("cat") == "user_annotation" and event["name"] in _RANGES:
                forward[event["tid"]].append(_interval(event, _RANGES[event["name"]]))
        self.pieces = {tid: flatten(ranges) for tid, ranges in forward.items()}
        backward = self._backward(events)
        for tid in backward.keys() | forward.keys():
            labelled = [(s, e, phase + _BACKWARD) for s, e, phase in backward.get(tid, [])]
            self.pieces[tid] = flatten([*forward.get(tid, []), *labelled])

    def _backward(self, events: Sequence[Mapping[str, Any]]) -> dict[Any, list[Interval]]:
        """Autograd nodes whose forward lay in a range, by thread."""
        phase_of: dict[Any, dict[int, str]] = defaultdict(dict)  # thread of the forward, sequence number
        nodes: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)  # the profiler's number of that thread
        for event in events:
            number = event.get("args", {}).get("Sequence number")
            if number is None or event.get("cat") != "cpu_op":
                continue
            if str(event["name"]).startswith(_NODE):
                nodes[event["args"].get("Fwd thread id")].append(event)
            elif not event["args"].get("Fwd thread id"):
                phase = self.at(event["tid"], event["ts"])
                if phase is not None and not phase.endswith(_BACKWARD):
                    phase_of[event["tid"]][number] = phase
        found: dict[Any, list[Interval]] = defaultdict(list)
        for group in nodes.values():
            # The trace numbers threads in two ways: the forward's is the one that knows most of the sequence numbers.
            known = [
                {e["args"]["Sequence number"]: table.get(e["args"]["Sequence number"]) for e in group}
                for table in phase_of.values()
            ]
            table = max(known, key=lambda t: sum(p is not None for p in t.values()), default={})
            for event in group:
                phase = table.get(event["args"]["Sequence number"])
                if phase is not None:
                    found[event["tid"]].append(_interval(event, phase))
        return found

    def at(self, tid: Any, time: float) -> str | None:
        """The label at a time, of the backward with its mark."""
        pieces = self.pieces.get(tid, [])
        index = bisect_right(pieces, time, key=lambda piece: piece[0]) - 1
        return pieces[index][2] if index >= 0 and time <= pieces[index][1] else None


def _interval(event: Mapping[str, Any], label: str) -> Interval:
    return event["ts"], event["ts"] + event["dur"], label


def _clipped(start: float, end: float, windows: Sequence[tuple[float, float]]) -> float:
    return sum(max(0.0, min(end, last) - max(start, first)) for first, last in windows)


def _union(intervals: Sequence[Interval], windows: Sequence[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end, _ in sorted(intervals):
        if end > reached:
            total += _clipped(max(start, reached), end, windows)
            reached = end
    return total


def summarize_trace(trace: Mapping[str, Any]) -> ProfileSummary:
    """Reads a Chrome trace that `Profiler` wrote.

    Raises:
        ValueError: it holds no step, or is no such trace.
    """
    if not isinstance(trace, Mapping) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError("not a Chrome trace: no list traceEvents")
    events = [e for e in trace["traceEvents"] if isinstance(e, Mapping) and e.get("ph") == "X" and "dur" in e]
    windows = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "user_annotation" and str(e["name"]).startswith(STEP)
    )
    if not windows:
        raise ValueError(f"the trace has no range {STEP!r}: it was not written by equipoise, or its step was not over")
    host = _Host(events)
    steps, scale = len(windows), 1e-3 / len(windows)
    step_us = sum(last - first for first, last in windows)

    host_us: dict[str, float] = defaultdict(float)
    for pieces in host.pieces.values():
        for start, end, label in pieces:
            host_us[label] += _clipped(start, end, windows)

    launched = {
        e["args"]["correlation"]: (e["tid"], e["ts"])
        for e in events
        if e.get("cat") not in _DEVICE and "correlation" in e.get("args", {})
    }
    device: list[Interval] = []
    for event in events:
        if event.get("cat") in _DEVICE:
            where = launched.get(event.get("args", {}).get("correlation"))
            phase = None if where is None else host.at(*where)
            device.append(_interval(event, "other" if phase is None else phase.rstrip(_BACKWARD)))
    exposed, overlapped, idle = divide(device, windows) if device else (defaultdict(float), 0.0, 0.0)
    phases = {
        phase: PhaseTime(
            host_us[phase] * scale,
            host_us[phase + _BACKWARD] * scale,
            _union([i for i in device if i[2] == phase], windows) * scale,
            exposed.get(phase, 0.0) * scale,
        )
        for phase in PHASES
    }
    return ProfileSummary(
        steps=steps,
        step_ms=step_us * scale,
        has_device=bool(device),
        phases=phases,
        other_host_ms=(step_us - sum(host_us.values())) * scale,
        other_device_ms=exposed.get("other", 0.0) * scale,
        overlapped_ms=overlapped * scale,
        idle_ms=idle * scale,
    )


def render_summary(summary: ProfileSummary) -> str:
    """A table in text: exposed milliseconds per step and their share of it, by phase."""
    lines = [f"{summary.steps} steps of {summary.step_ms:.3f} ms; milliseconds per step, and their share of it"]
    header = f"{'phase':12}{'host forward':>14}{'backward':>10}{'share':>8}"
    if summary.has_device:
        header += f"{'device busy':>14}{'exposed':>10}{'share':>8}"
    lines.append(header)

    def row(name: str, forward: float | None, backward: float | None, busy: float | None, exposed: float) -> str:
        host = (forward or 0.0) + (backward or 0.0)
        cells = f"{name:12}{_cell(forward, 14)}{_cell(backward, 10)}"
        cells += f"{host / summary.step_ms:8.1%}" if forward is not None else " " * 8
        if summary.has_device:
            cells += f"{_cell(busy, 14)}{_cell(exposed, 10)}{exposed / summary.step_ms:8.1%}"
        return cells.rstrip()

    for name, time in summary.phases.items():
        if any(asdict(time).values()):
            lines.append(row(name, time.forward_ms, time.backward_ms, time.device_ms, time.exposed_ms))
    lines.append(row("other", summary.other_host_ms, None, None, summary.other_device_ms))
    if summary.has_device:
        lines.append(row("several", None, None, None, summary.overlapped_ms))
        lines.append(row("idle", None, None, None, summary.idle_ms))
    absent = [name for name, time in summary.phases.items() if not any(asdict(time).values())]
    if absent:
        lines.append(f"not seen in these steps: {', '.join(absent)}")
    return "\n".join(lines) + "\n"


def _cell(value: float | None, width: int) -> str:
    return " " * width if value is None else f"{value:{width}.3f}"
