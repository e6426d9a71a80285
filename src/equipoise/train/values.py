"""Values by declared type: from the text of a command line, and from what TOML can hold.

Nothing here refuses a value: what is not of the type is passed on as it stands, for strict validation to
refuse.
"""

import enum
import re
import tomllib
import typing
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from equipoise.train.schema import choices, element_types, strip_annotated, union_members

TRUE_WORDS = ("true", "1", "yes", "on")
FALSE_WORDS = ("false", "0", "no", "off")
_INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_NUMBER = re.compile(r"[+-]?([0-9]+(_[0-9]+)*\.?|[0-9]*\.[0-9]+)([0-9]*)(e[+-]?[0-9]+)?|[+-]?(inf|nan)", re.IGNORECASE)

_NO_VALUE = object()


def is_number(text: str) -> bool:
    """Whether `text` spells an integer or a float, signs, exponents, `inf` and `nan` included."""
    return _NUMBER.fullmatch(text) is not None


def parse_value(annotation: Any, text: str) -> Any:
    """`text` as a value of the declared type; `text` itself when it is none, so that validation refuses it.

    Settings that admit text take it as it stands, unless it equals another member of their type.
    """
    members = union_members(annotation)
    for member in sorted(members, key=_precedence):
        value = _parse_as(member, text)
        if value is not _NO_VALUE:
            return from_toml(annotation, value)
    return text


def from_toml(annotation: Any, value: Any) -> Any:
    """`value` with the containers and classes of its declared type: lists become tuples or sets, text becomes
    paths or members of an enum, wherever the type asks for them.
    """
    members = union_members(annotation)
    if isinstance(value, str) and str in members:
        return value
    for member in members:
        origin = typing.get_origin(member) or member
        elements = element_types(member)
        if isinstance(value, list) and elements is not None:
            items = [from_toml(elements[min(i, len(elements) - 1)], item) for i, item in enumerate(value)]
            hashable = origin not in (set, frozenset) or not any(isinstance(i, (list, dict, set)) for i in items)
            return origin(items) if origin in (tuple, set, frozenset) and hashable else items
        if isinstance(value, dict) and origin is dict and typing.get_args(member):
            return {k: from_toml(typing.get_args(member)[1], v) for k, v in value.items()}
        if isinstance(origin, type) and issubclass(origin, enum.Enum):
            if not isinstance(value, (list, dict)) and value in choices(origin):
                return origin(value)
        elif isinstance(origin, type) and issubclass(origin, PurePath) and isinstance(value, str) and value:
            return origin(value)
    return value


def _precedence(member: Any) -> int:
    """Order in which the members of a union are tried: the most particular first, text last."""
    if choices(member):
        return 0
    order = [type(None), int, bool, float]
    if member in order:
        return 1 + order.index(member)
    return 9 if member is str else 8


def _parse_as(member: Any, text: str) -> Any:
    member, _ = strip_annotated(member)
    if member is type(None):
        return None if text.lower() == "none" else _NO_VALUE
    if values := choices(member):
        return next((c for c in values if _equals_choice(c, text)), _NO_VALUE)
    if member is bool:
        word = text.lower()
        return True if word in TRUE_WORDS else False if word in FALSE_WORDS else _NO_VALUE
    if member is int:
        return int(text) if _INTEGER.fullmatch(text) else _NO_VALUE
    if member is float:
        return float(text) if _NUMBER.fullmatch(text) else _NO_VALUE
    elements = element_types(member)
    if elements is not None:
        return _parse_list(elements, text)
    if member is dict or typing.get_origin(member) is dict or member is Any:
        return _parse_toml(text)
    return text


def _equals_choice(choice: Any, text: str) -> bool:
    if isinstance(choice, bool):
        return text.lower() in (TRUE_WORDS if choice else FALSE_WORDS)
    return str(choice) == text


def _parse_list(elements: Sequence[Any], text: str) -> Any:
    """`[1, 2]` as TOML, or else items between commas (brackets optional), each read by its element type."""
    text = text.strip()
    bracketed = text.startswith("[") and text.endswith("]")
    if bracketed:
        value = _parse_toml(text)
        if value is not _NO_VALUE:
            return value
        text = text[1:-1].strip()
    if not text:
        return _NO_VALUE
    items = [item.strip() for item in text.removesuffix(",").split(",")]
    return [parse_value(elements[min(i, len(elements) - 1)], item) for i, item in enumerate(items)]


def _parse_toml(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return _NO_VALUE
    return table["value"] if len(table) == 1 else _NO_VALUE
