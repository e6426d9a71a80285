"""Settings given on the command line: `--section.key value` in all its spellings, read by type."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from equipoise.train.problems import Problem, unknown_key
from equipoise.train.schema import Schema
from equipoise.train.values import is_number, parse_value

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Override:
    """A known key, its value and how the user spelled the value."""

    key: str
    value: Any
    given: str


@dataclass(frozen=True)
class Arguments:
    """Command-line arguments, sorted out."""

    positionals: list[int]
    """Indices of the arguments that are neither an option nor an option's value."""
    overrides: list[Override]
    problems: list[Problem]


def read_arguments(schema: Schema, arguments: Sequence[str], options: Sequence[str] = ()) -> Arguments:
    """Sort `arguments` into positionals and overrides; what is wrong is collected, never raised.

    `options` are the command's own, which messages may name.

    An option takes the next argument as its value unless that looks like an option itself (negative numbers
    do not). Without a value it means true, for settings that have a true; `--section.no-key` and
    `--no-section.key` mean false and take no value. Dashes in names equal underscores. The last one wins.
    """
    out = Arguments([], [], [])
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not looks_like_option(argument):
            out.positionals.append(len(arguments) - len(rest) - 1)
            continue
        name, has_value, text = argument.lstrip("-").partition("=")
        key = name.replace("-", "_")
        value: str | None = text if has_value else None
        negated = _negated(schema, key)
        if negated is not None:
            if value is None:
                out.overrides.append(Override(negated[0], negated[1], argument))
            else:
                out.problems.append(_problem(argument, "the no- form takes no value", None))
            continue
        if value is None and rest and not looks_like_option(rest[0]):
            value = rest.pop(0)
        _read_one(schema, out, name, key, value, options)
    return out


def looks_like_option(argument: str) -> bool:
    """Whether an argument starts an option: a dash and then more, unless it is a negative number."""
    return len(argument) > 1 and argument.startswith("-") and not is_number(argument)


def _read_one(schema: Schema, out: Arguments, name: str, key: str, value: str | None, options: Sequence[str]) -> None:
    setting = schema.settings.get(key)
    if setting is None:
        section = schema.sections.get(key)
        if section is not None and section.optional and value in (None, "none"):
            out.overrides.append(Override(key, None if value else {}, value or "given bare"))
        else:
            out.problems.append(_problem(name, unknown_key(schema, key, options), value))
    elif value is not None:
        out.overrides.append(Override(key, parse_value(setting.annotation, value), quoted(value)))
    elif setting.boolean:
        out.overrides.append(Override(key, True, "true"))
    else:
        out.problems.append(_problem(key, f"needs a value: {setting.expected}", None))


def _problem(key: str, message: str, value: str | None) -> Problem:
    return Problem(key, message, None if value is None else quoted(value), COMMAND_LINE)


def quoted(text: str) -> str:
    """Text of the command line as messages show it: quoted unless it reads as a plain number or word."""
    return text if re.fullmatch(r"[\w.+-]+", text, re.ASCII) else f'"{text}"'


def _negated(schema: Schema, key: str) -> tuple[str, Any] | None:
    """`(key, value)` that a no- form stands for: false for booleans, none for optional sections."""
    if key in schema.settings or key in schema.sections:
        return None
    parent, _, leaf = key.rpartition(".")
    candidates = [key.removeprefix("no_")] if key.startswith("no_") else []
    if leaf.startswith("no_"):
        candidates.append(f"{parent}.{leaf[3:]}" if parent else leaf[3:])
    for candidate in candidates:
        if candidate in schema.settings and schema.settings[candidate].boolean:
            return candidate, False
        if candidate in schema.sections and schema.sections[candidate].optional:
            return candidate, None
    return None
