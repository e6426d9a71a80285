"""What selection knows about each backend before it makes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from equipoise.accelerator.base import Accelerator, Capability

#: Third-party packages register here: the entry point's name is the backend's, its object a `Registration`
#: or a function without arguments that returns one.
ENTRY_POINT_GROUP = "equipoise.accelerators"


@dataclass(frozen=True)
class Registration:
    """One backend that can be chosen.

    `name`: as written in `EQUIPOISE_ACCELERATOR`. `factory`: makes the backend; called once, after it was
    chosen. `is_available`: whether a device is there and, as a `Capability`, why; must not start a device
    context; may raise. `priority`: the highest available one wins, ties by name. `communication_backends`:
    its transports, the default one first. `device_type`: torch's device type, the name if None.
    `request_variables`: variables whose presence asks for this backend. `bootstrap`: gets the environment,
    loads what the vendor needs; called once, after the backend was chosen and before it is validated and
    made. `hint`: a text when hardware or a runtime of the vendor seems present though `is_available` said no.
    `automatic`: False keeps it from being chosen without a request.
    """

    name: str
    factory: Callable[[], Accelerator]
    is_available: Callable[[], Capability | bool]
    priority: int = 0
    communication_backends: tuple[str, ...] = ()
    device_type: str | None = None
    request_variables: tuple[str, ...] = ()
    bootstrap: Callable[[Mapping[str, str]], None] | None = None
    hint: Callable[[], str | None] | None = None
    automatic: bool = True
