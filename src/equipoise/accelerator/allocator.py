"""The one allocator switch that the environment has.

`EQUIPOISE_ENABLE_EXPANDABLE_SEGMENTS`: 0 or unset leaves the allocator untouched, 1 switches expandable
segments on (less fragmentation when sizes vary from step to step), anything else is an error.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping

from equipoise.accelerator.base import Accelerator, Capability
from equipoise.errors import ConfigError

VARIABLE = "EQUIPOISE_ENABLE_EXPANDABLE_SEGMENTS"

_log = logging.getLogger("equipoise.accelerator")


def expandable_segments_requested(environ: Mapping[str, str]) -> bool:
    """What the variable says; `ConfigError` for anything but 0 and 1."""
    text = environ.get(VARIABLE, "0")
    if text not in ("0", "1"):
        raise ConfigError(
            f"{VARIABLE}={text!r} is not understood; expected 1 (switch expandable segments on) "
            "or 0 (leave the allocator as it is), or leave it unset"
        )
    return text == "1"


def configure_allocator(accelerator: Accelerator, environ: Mapping[str, str]) -> Capability:
    """Do what the variable asks for. Warns where the runtime cannot; raises `ConfigError` for a malformed
    value."""
    if not expandable_segments_requested(environ):
        return Capability(False, f"{VARIABLE} does not ask for expandable segments; the allocator is untouched")
    answer = accelerator.enable_expandable_segments()
    if answer:
        _log.info("expandable segments are on: %s", answer.reason)
    else:
        warnings.warn(
            f"{VARIABLE}=1 has no effect on {accelerator.name}: {answer.reason}", RuntimeWarning, stacklevel=2
        )
    return answer
