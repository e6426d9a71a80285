"""Which backend a process uses, decided once, with a trace of how.

The order: `EQUIPOISE_ACCELERATOR`; else a variable by which a backend is asked for (such as
`MUSA_VISIBLE_DEVICES`); else the available backend of highest priority, ties by name; else the CPU. Blank
values and "auto" ask for nothing. A backend that was asked for and cannot be used is an error, never
replaced.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import torch

from equipoise.accelerator import generic
from equipoise.accelerator.allocator import configure_allocator, expandable_segments_requested
from equipoise.accelerator.base import Accelerator, Capability
from equipoise.accelerator.registry import ENTRY_POINT_GROUP, Registration
from equipoise.errors import ConfigError

VARIABLE = "EQUIPOISE_ACCELERATOR"
BUILT_IN = ("equipoise.accelerator.cpu", "equipoise.accelerator.cuda", "equipoise.accelerator.musa")

_log = logging.getLogger("equipoise.accelerator")


@dataclass(frozen=True)
class Considered:
    """One line of the trace. `available` is None when the backend was not asked."""

    name: str
    priority: int
    available: bool | None
    reason: str


@dataclass(frozen=True)
class Selection:
    """How the decision went. `winner` is None when the request cannot be met, and `error` says why.

    `requested_by` is the variable (or call) that asked for a backend; `variables` are those looked at that
    are set.
    """

    winner: str | None
    reason: str
    requested_by: str | None
    considered: tuple[Considered, ...]
    variables: dict[str, str]
    error: str | None = None
    hints: tuple[str, ...] = ()


@dataclass
class _State:
    """What this process has decided and registered."""

    registered: dict[str, Registration] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)  # entry points that failed to load, with the error
    bootstrapped: set[str] = field(default_factory=set)
    current: Accelerator | None = None
    by_type: dict[str, Accelerator] = field(default_factory=dict)  # made for tensors of other devices
    selection: Selection | None = None


_state = _State()
_lock = threading.RLock()


def register_accelerator(
    name: str,
    factory: Callable[[], Accelerator],
    is_available: Callable[[], Capability | bool],
    priority: int = 0,
    communication_backends: tuple[str, ...] = (),
    **more: Any,
) -> None:
    """Add a backend, or replace the one of that name. `more` are the other fields of `Registration`.

    Raises `ConfigError` for a name that is blank or "auto", and when a backend was chosen already.
    """
    register(Registration(name, factory, is_available, priority, communication_backends=communication_backends, **more))


def register(registration: Registration) -> None:
    """Add a backend given as one `Registration`; see `register_accelerator`."""
    name = registration.name
    if not name or name != name.strip().lower() or name == "auto":
        raise ConfigError(f"{name!r} cannot name a backend; use lower case without blanks, and not 'auto'")
    with _lock:
        if _state.current is not None:
            raise ConfigError(
                f"backend {name!r} was registered after {_state.current.name!r} had been chosen; "
                "register before the first get_accelerator() or initialize_accelerator()"
            )
        _state.registered[name] = registration


def set_accelerator(accelerator: Accelerator) -> None:
    """Use this backend object from now on, whatever the environment says."""
    with _lock:
        _state.current = accelerator
        _state.selection = Selection(accelerator.name, "injected", "set_accelerator()", (), _seen((), os.environ))


def reset() -> None:
    """Forget the decision and everything registered in code. For tests."""
    with _lock:
        _state.__init__()  # type: ignore[misc]


def initialize_accelerator() -> Accelerator | None:
    """Decide now, if that has not happened. None when nothing is requested and no accelerator is present.

    Call it before importing a package that decides on its own (a serving engine, a vendor's framework).
    Raises `ConfigError` when the requested backend is unknown or cannot be used.
    """
    with _lock:
        if _state.current is not None and not _is_fallback():
            return _state.current
        selection = _decide(os.environ)
        if selection.error is not None:
            raise ConfigError(selection.error)
        _state.selection = selection
        if _is_fallback():
            return None
        _state.current = _make(selection)
        return _state.current


def get_accelerator() -> Accelerator:
    """The backend of this process, deciding first if needed; the CPU when there is nothing else.

    Raises `ConfigError` when the requested backend is unknown or cannot be used.
    """
    with _lock:
        if _state.current is not None:
            return _state.current
        chosen = initialize_accelerator()
        if chosen is None:
            assert _state.selection is not None
            chosen = _state.current = _make(_state.selection)
            for hint in _state.selection.hints:
                warnings.warn(f"training on the CPU, though {hint}", RuntimeWarning, stacklevel=2)
        return chosen


def _make(selection: Selection) -> Accelerator:
    """The winner's object, with the allocator set as the environment asks and the limits of the backend
    named."""
    assert selection.winner is not None
    expandable_segments_requested(os.environ)  # a malformed value stops here, before a device is touched
    accelerator = _registrations(only=selection.winner)[selection.winner].factory()
    configure_allocator(accelerator, os.environ)
    _log.debug("accelerator: %s (%s)", selection.winner, selection.reason)
    limits = accelerator.limits()
    if limits:
        warnings.warn(f"limits of {accelerator.name}: {'; '.join(limits)}", RuntimeWarning, stacklevel=3)
    return accelerator


def accelerator_for(device: torch.device | str) -> Accelerator:
    """The backend of a tensor's device, whatever the environment says. For use inside other frameworks.

    Raises `ConfigError` when no backend handles that device type.
    """
    device_type = torch.device(device).type
    with _lock:
        if _state.current is not None and _state.current.device_type == device_type:
            return _state.current
        if device_type in _state.by_type:
            return _state.by_type[device_type]
        known = _registrations()
        for name, registration in sorted(known.items(), key=_order):
            if (registration.device_type or name) == device_type:
                _bootstrap(registration, os.environ)
                return _state.by_type.setdefault(device_type, registration.factory())
    raise ConfigError(f"no backend handles {device_type!r} tensors; registered are {', '.join(sorted(known))}")


def selection_report() -> dict[str, Any]:
    """The trace as plain data: `considered` (name, priority, available, reason), `winner`, `reason`,
    `requested_by`, `variables`, `error`, `hints`. Decides without keeping the decision if none was made;
    never raises for a backend that cannot be used."""
    with _lock:
        return asdict(_state.selection or _decide(os.environ))


def _is_fallback() -> bool:
    """Whether the decision was: nothing requested, nothing present."""
    s = _state.selection
    return s is not None and s.winner == "cpu" and s.requested_by is None


def _decide(environ: Mapping[str, str]) -> Selection:
    request = _asked(environ, VARIABLE)
    if request is not None:
        return _decide_requested(request.lower(), VARIABLE, environ)
    known = _registrations()
    for name, registration in sorted(known.items(), key=_order):
        for variable in registration.request_variables:
            if _asked(environ, variable) is not None:
                return _decide_requested(name, variable, environ)
    return _decide_by_priority(known, environ)


def _decide_requested(name: str, variable: str, environ: Mapping[str, str]) -> Selection:
    known = _registrations(only=name)
    variables = _seen(known.values(), environ)
    asked = f"{variable}={environ[variable]!r}"
    override = (
        f"unset {variable} or set it to another backend"
        if variable == VARIABLE
        else f"set {VARIABLE} to another backend, which wins over {variable}, or unset {variable}"
    )
    others = tuple(
        Considered(other, r.priority, None, f"not asked: {asked} decides")
        for other, r in sorted(known.items(), key=_order)
        if other != name
    )
    if name not in known:
        names = ", ".join(sorted(known))
        error = f"{asked} names an unknown accelerator backend; registered are {names}; {override}"
        if name in _state.broken:
            error = f"{asked} asks for a backend that failed to load: {_state.broken[name]}; {override}"
        return Selection(None, "the request cannot be met", variable, others, variables, error)
    registration = known[name]
    answer = _bootstrap_and_probe(registration, environ)
    considered = (Considered(name, registration.priority, answer.ok, answer.reason), *others)
    if not answer.ok:
        error = f"{asked} asks for the {name} backend, which is unavailable: {answer.reason}; {override}"
        return Selection(None, "the request cannot be met", variable, considered, variables, error)
    return Selection(name, f"requested by {asked}", variable, considered, variables)


def _decide_by_priority(known: dict[str, Registration], environ: Mapping[str, str]) -> Selection:
    variables = _seen(known.values(), environ)
    considered = []
    best: Registration | None = None
    hints: list[str] = []
    for name, registration in sorted(known.items(), key=_order):
        answer = _probe(registration)
        considered.append(Considered(name, registration.priority, answer.ok, answer.reason))
        if name == "cpu":
            continue
        if answer.ok and best is None and registration.automatic:
            best = registration
        elif not answer.ok and registration.hint is not None:
            hints.extend(filter(None, [_isolated(registration.hint)]))
    considered += [Considered(n, 0, False, f"failed to load: {e}") for n, e in sorted(_state.broken.items())]
    if best is None:
        reason = "nothing was requested and no accelerator is present"
        return Selection("cpu", reason, None, tuple(considered), variables, hints=tuple(hints))
    error = None
    if best.bootstrap is not None:
        answer = _bootstrap_and_probe(best, environ)
        if not answer.ok:
            error = (
                f"the {best.name} backend has the highest priority of those available, but cannot be used: "
                f"{answer.reason}; set {VARIABLE} to another backend, such as cpu"
            )
    reason = f"the available backend of highest priority ({best.priority})"
    return Selection(None if error else best.name, reason, None, tuple(considered), variables, error)


def _bootstrap_and_probe(registration: Registration, environ: Mapping[str, str]) -> Capability:
    """Load what the vendor needs, then ask again whether the backend can be used."""
    try:
        _bootstrap(registration, environ)
    except Exception as error:  # a vendor's module may raise anything; the trace and the error carry it
        _log.info("the bootstrap of %s failed", registration.name, exc_info=True)
        return Capability(False, f"its bootstrap failed: {type(error).__name__}: {error}")
    return _probe(registration)


def _bootstrap(registration: Registration, environ: Mapping[str, str]) -> None:
    if registration.bootstrap is not None and registration.name not in _state.bootstrapped:
        registration.bootstrap(environ)
        _state.bootstrapped.add(registration.name)


def _probe(registration: Registration) -> Capability:
    """The backend's own answer; a probe that raises is an answer too, and does not reach the others."""
    try:
        answer = registration.is_available()
    except Exception as error:
        text = f"its probe raised {type(error).__name__}: {error}"
        warnings.warn(f"accelerator backend {registration.name!r} is left out: {text}", RuntimeWarning, stacklevel=2)
        return Capability(False, text)
    if isinstance(answer, Capability):
        return answer
    return Capability(bool(answer), "its probe says so" if answer else "its probe says no")


def _isolated(function: Callable[[], str | None]) -> str | None:
    try:
        return function()
    except Exception as error:
        _log.debug("the hint of a backend raised %s: %s", type(error).__name__, error)
        return None


def _registrations(only: str | None = None) -> dict[str, Registration]:
    """Built-in, third-party and in-code registrations by name; later ones replace earlier ones of the same
    name.

    With `only`, third-party packages are loaded only for that name: an explicit choice imports no other
    vendor.
    """
    found = {r.name: r for r in (import_module(module).REGISTRATION for module in BUILT_IN)}
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        name = entry_point.name
        if name in _state.registered or name in _state.broken or (only is not None and name != only):
            continue
        try:
            loaded = entry_point.load()
            _state.registered[name] = loaded if isinstance(loaded, Registration) else loaded()
        except Exception as error:
            _state.broken[name] = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"accelerator backend {name!r} ({entry_point.value}) failed to load: {_state.broken[name]}",
                RuntimeWarning,
                stacklevel=2,
            )
    found |= _state.registered
    other = generic.registration({r.device_type or r.name for r in found.values()})
    return found if other is None else {**found, other.name: other}


def _order(item: tuple[str, Registration]) -> tuple[int, str]:
    return (-item[1].priority, item[0])


def _asked(environ: Mapping[str, str], variable: str) -> str | None:
    """The variable's content if it asks for something."""
    text = environ.get(variable, "").strip()
    return None if text.lower() in ("", "auto") else text


def _seen(registrations: Any, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that bear on the choice and are set."""
    names = [VARIABLE, "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"]
    for registration in registrations:
        names += registration.request_variables
    return {name: environ[name] for name in names if name in environ}
