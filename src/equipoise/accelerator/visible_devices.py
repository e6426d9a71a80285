"""Which devices a process may see, as a typed value.

Two kinds of numbers name a device and are never mixed here. The *local* ordinal counts the devices that this
process sees: it is what `torch.device("cuda", i)` takes. The *physical* id names the device on the machine:
an ordinal, a UUID, or a MIG id. A variable such as `CUDA_VISIBLE_DEVICES` lists physical ids in local order.

The grammar is CUDA's, as torch reads it: unset means all devices; an empty or blank value means none; a
negative number ends the list, and so does an entry that is no number; a number given twice empties it; a list
that starts with a `GPU-` or `MIG-` id holds only such ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from equipoise.errors import ConfigError

PhysicalId = int | str

_UUID_PREFIXES = ("GPU-", "MIG-")


@dataclass(frozen=True)
class VisibleDevices:
    """The physical ids that a process sees, in local order; `ids` is None when nothing hides a device.

    `variable` and `text` say where that came from; both None when no variable is set.
    """

    ids: tuple[PhysicalId, ...] | None = None
    variable: str | None = None
    text: str | None = None

    @classmethod
    def parse(cls, text: str | None, variable: str | None = None) -> VisibleDevices:
        """The value of `text`, the content of `variable`; None is a variable that is not set. Never
        raises."""
        return cls(None if text is None else _parse_list(text), variable, text)

    @classmethod
    def from_environment(cls, variables: Sequence[str], environ: Mapping[str, str]) -> VisibleDevices:
        """The value of the first of `variables` that is set; "auto" counts as not set."""
        for variable in variables:
            text = environ.get(variable)
            if text is not None and text.strip().lower() != "auto":
                return cls.parse(text, variable)
        return cls()

    def within(self, outer: VisibleDevices) -> VisibleDevices:
        """The ids on the machine, when this value's ordinals count the devices that `outer` leaves.

        ROCm applies two variables that way: `ROCR_VISIBLE_DEVICES` first, then `HIP_VISIBLE_DEVICES`.
        Raises `ConfigError` when this value asks for a device that `outer` hides.
        """
        if outer.ids is None:
            return self
        if self.ids is None:
            return outer
        ids: list[PhysicalId] = []
        for entry in self.ids:
            if isinstance(entry, int):
                if entry >= len(outer.ids):
                    raise ConfigError(
                        f"{self} asks for device {entry} of the {len(outer.ids)} that {outer} leaves; "
                        f"count from 0 within {outer.variable}, or unset one of the two"
                    )
                ids.append(outer.ids[entry])
            else:
                ids.append(outer.ids[outer.to_local(entry)])
        return VisibleDevices(tuple(ids), self.variable, self.text)

    def to_physical(self, local: int) -> PhysicalId:
        """The physical id of local ordinal `local`. `ConfigError` when this process does not see so many."""
        if isinstance(local, bool) or not isinstance(local, int) or local < 0:
            raise ConfigError(f"{local!r} is not a local device ordinal; give an integer of at least 0")
        if self.ids is None:
            return local
        if local >= len(self.ids):
            raise ConfigError(
                f"local device {local} does not exist: {self} shows {len(self.ids)} device(s), counted from 0"
            )
        return self.ids[local]

    def to_local(self, physical: PhysicalId, machine_uuids: Sequence[str] | None = None) -> int:
        """The local ordinal of a physical id: an ordinal (or its decimal text), a UUID, a MIG id, or a unique
        prefix.

        `machine_uuids` are the UUIDs of all devices of the machine by physical ordinal. They are needed only
        where ordinals must be compared with UUIDs. Raises `ConfigError` when the id is malformed, hidden,
        ambiguous, or cannot be compared.
        """
        wanted = _checked_id(physical)
        if self.ids is None:
            return wanted if isinstance(wanted, int) else self._ordinal(wanted, machine_uuids)
        if wanted in self.ids:
            return self.ids.index(wanted)
        if any(isinstance(entry, int) != isinstance(wanted, int) for entry in self.ids):
            if isinstance(wanted, str):
                wanted = self._ordinal(wanted, machine_uuids)
            elif machine_uuids is None or wanted >= len(machine_uuids):
                raise ConfigError(
                    f"device {wanted} cannot be found in {self}, which lists UUIDs; "
                    "give the device's UUID, or the UUIDs of the machine's devices"
                )
            else:
                wanted = machine_uuids[wanted]
            if wanted in self.ids:
                return self.ids.index(wanted)
        matches = [i for i, entry in enumerate(self.ids) if _same(entry, wanted)]
        if len(matches) > 1:
            raise ConfigError(f"device {physical!r} is ambiguous: {self} holds {len(matches)} ids that fit it")
        if not matches:
            raise ConfigError(f"device {physical!r} is hidden from this process by {self}")
        return matches[0]

    def locals_of(self, ids: Sequence[PhysicalId], machine_uuids: Sequence[str] | None = None) -> list[int]:
        """Local ordinals of the ids that a scheduler gave this process, such as Ray's accelerator ids."""
        return [self.to_local(physical, machine_uuids) for physical in ids]

    def _ordinal(self, uuid: str, machine_uuids: Sequence[str] | None) -> int:
        if machine_uuids is None:
            raise ConfigError(
                f"device {uuid!r} cannot be turned into an ordinal under {self}: "
                "the UUIDs of the machine's devices were not given"
            )
        matches = [i for i, other in enumerate(machine_uuids) if _same(other, uuid)]
        if len(matches) != 1:
            found = "no device" if not matches else f"{len(matches)} devices"
            raise ConfigError(f"device {uuid!r} fits {found} of this machine; give the whole UUID")
        return matches[0]

    def __str__(self) -> str:
        if self.variable is None:
            return "all devices (no variable hides any)"
        return f"{self.variable}={self.text!r}"


def _parse_list(text: str) -> tuple[PhysicalId, ...]:
    """The ids in the content of a variable; see the grammar in the module's docstring."""
    entries = text.split(",")
    prefix = next((p for p in _UUID_PREFIXES if text.startswith(p)), None)
    ids: list[PhysicalId] = []
    for entry in entries:
        value: PhysicalId
        if prefix is not None:
            if not entry.startswith(prefix):
                break
            value = entry
        else:
            match = re.match(r"[+-]?[0-9]+", entry.strip())
            if match is None or int(match[0]) < 0:
                break
            value = int(match[0])
        if value in ids:
            return ()
        ids.append(value)
    return tuple(ids)


def _checked_id(physical: object) -> PhysicalId:
    if isinstance(physical, int) and not isinstance(physical, bool) and physical >= 0:
        return physical
    if isinstance(physical, str):
        if re.fullmatch(r"[0-9]+", physical):
            return int(physical)
        if re.fullmatch(r"(GPU|MIG)-\S+", physical):
            return physical
    raise ConfigError(
        f"{physical!r} is not a device id; "
        "expected an ordinal of at least 0, a GPU- or MIG- UUID, or the beginning of one"
    )


def _same(a: PhysicalId, b: PhysicalId) -> bool:
    """Whether two ids can name one device: equal, or one a prefix of the other."""
    if isinstance(a, int) or isinstance(b, int):
        return a == b
    return a.startswith(b) or b.startswith(a)
