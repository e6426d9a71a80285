"""What is wrong with a configuration, collected so that one error can report all of it."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.errors import ConfigError
from equipoise.train.schema import Schema


@dataclass(frozen=True)
class Problem:
    """One thing that the user has to change."""

    key: str
    """Dotted key as the user wrote it; empty when no single key is to blame."""
    message: str
    """What is wrong and what would be right."""
    given: str | None = None
    """The value as the user wrote it; `None` when there was no value."""
    origin: str | None = None
    """Where the value came from: a recipe's name or path, or `command line`."""

    def __str__(self) -> str:
        subject = self.key if self.given is None else f"{self.key} = {self.given}"
        if self.origin:
            subject = f"{subject} ({self.origin})" if subject else self.origin
        return f"{subject}: {self.message}" if subject else self.message


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise one `ConfigError` that names every problem, in the order found; do nothing when there is none."""
    if not problems:
        return
    unique = list(dict.fromkeys(str(p) for p in problems))
    if len(unique) == 1:
        raise ConfigError(f"The configuration has a problem:\n  {unique[0]}")
    listed = "\n".join(f"  {text}" for text in unique)
    raise ConfigError(f"The configuration has {len(unique)} problems:\n{listed}")


def unknown_key(schema: Schema, key: str, options: Sequence[str] = ()) -> str:
    """Message for a key that does not exist, with the nearest right name, be it one of the command's `options`."""
    if key in schema.sections:
        keys = ", ".join(s.key for s in schema.settings_of(key)[:4])
        return f"this is a section, not a setting; set its keys ({keys}, ...)"
    parent = key.rpartition(".")[0]
    while parent:
        if parent in schema.settings:
            return f"unknown key; {parent} is a single value ({schema.settings[parent].expected})"
        parent = parent.rpartition(".")[0]
    near = [*nearest_options(options, key), *nearest_names(schema, key)]
    if near:
        return f"unknown key; did you mean {' or '.join(near)}?"
    return f"unknown key; the sections are {', '.join(k for k in schema.sections if k and '.' not in k)}"


def nearest_options(options: Sequence[str], key: str) -> list[str]:
    """At most one of `options` (`--out`, say), which the key, having no dot, begins or nearly spells."""
    word = key.replace("_", "-")
    if "." in word:
        return []
    names = [option.lstrip("-") for option in options]
    near = [n for n in names if n.startswith(word)] or difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    return [f"--{name}" for name in near[:1]]


def nearest_names(schema: Schema, key: str) -> list[str]:
    """Up to three existing keys or sections that `key` may have meant, the likeliest first; may be empty."""
    names = [*schema.settings, *(section for section in schema.sections if section)]
    leaf = key.rpartition(".")[2]
    same_leaf = [name for name in names if name.rpartition(".")[2] == leaf]
    if same_leaf:  # the right name in the wrong section
        return difflib.get_close_matches(key, same_leaf, n=3, cutoff=0.0)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.75)
    if near:
        return near
    by_leaf = {name.rpartition(".")[2]: name for name in reversed(names)}
    near = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)
    if near:
        return [by_leaf[near[0]]]
    return difflib.get_close_matches(key, names, n=1, cutoff=0.6)
