"""From a recipe and command-line overrides to a validated configuration, or one error that names everything.

Layers, the last one wins: defaults of the classes, the recipes that the recipe extends, the recipe, the
command line. Types are strict: no text for a number, no fraction for an integer.
"""

import os
from collections.abc import Iterator, Sequence
from importlib.resources.abc import Traversable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from equipoise.errors import ConfigError
from equipoise.train.overrides import COMMAND_LINE, quoted, read_arguments
from equipoise.train.problems import Problem, raise_problems, unknown_key
from equipoise.train.recipes import Layer, parse_toml, read_layers
from equipoise.train.schema import Schema, read_schema, spell
from equipoise.train.values import from_toml, parse_value

ConfigT = TypeVar("ConfigT", bound=BaseModel)
_SHOWN_LENGTH = 80


def load_config(
    root: type[ConfigT],
    recipe: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    *,
    presets: Traversable | None = None,
    options: Sequence[str] = (),
) -> ConfigT:
    """Validated instance of `root`.

    Args:
        recipe: a preset's name, the path of a TOML file, or `None` for the defaults of the classes.
        overrides: command-line arguments such as `["--train.steps", "5", "--train.no-compile"]`.
        presets: folder that replaces the presets of the package.
        options: the command's own options (`--out`, ...), which a misspelt one in `overrides` may have meant.

    Raises:
        ConfigError: names every unknown key, wrong type, value out of range and impossible combination.
    """
    schema = read_schema(root)
    values = _Values(schema)
    arguments = read_arguments(schema, overrides, options)
    problems = list(arguments.problems)
    problems += [
        Problem("", f"unexpected argument {quoted(overrides[i])}; settings are given as --section.key value")
        for i in arguments.positionals
    ]
    try:
        layers = read_layers(recipe, presets) if recipe is not None else []
    except ConfigError as error:
        raise_problems([Problem("", str(error)), *problems])
        raise
    for layer in layers:
        problems += values.add_layer(layer)
    for override in arguments.overrides:
        values.set(override.key, override.value, override.given, COMMAND_LINE)
    return _validated(root, values, problems)


def parse_config(root: type[ConfigT], text: str, origin: str = "text") -> ConfigT:
    """Validated instance of `root` from TOML text, such as `to_toml` writes; raises `ConfigError`."""
    values = _Values(read_schema(root))
    problems = values.add_layer(Layer(origin, parse_toml(text, origin)))
    return _validated(root, values, problems)


def split_recipe(root: type[BaseModel], arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe (the first argument that is no option and no option's value) and the other arguments."""
    positionals = read_arguments(read_schema(root), arguments).positionals
    if not positionals:
        return None, list(arguments)
    first = positionals[0]
    return arguments[first], [*arguments[:first], *arguments[first + 1 :]]


class _Values:
    """Values by dotted key, each with its spelling and origin for messages."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.flat: dict[str, Any] = {}
        self.given: dict[str, str] = {}
        self.origin: dict[str, str] = {}

    def set(self, key: str, value: Any, given: str, origin: str) -> None:
        """Set one setting, or switch one optional section on (`{}`) or off (`None`)."""
        if key in self.schema.sections and value is None:
            self.flat = {k: v for k, v in self.flat.items() if not k.startswith(f"{key}.")}
        parent = key.rpartition(".")[0]
        while parent:  # a later setting of a section that an earlier layer switched off switches it on
            if self.flat.get(parent, {}) is None:
                self.flat[parent] = {}
            parent = parent.rpartition(".")[0]
        self.flat[key], self.given[key], self.origin[key] = value, given, origin

    def add_layer(self, layer: Layer) -> list[Problem]:
        """Set all values of a file; returns its unknown keys and misplaced tables."""
        return list(self._add_table("", layer.values, layer.origin))

    def _add_table(self, prefix: str, table: dict[str, Any], origin: str) -> Iterator[Problem]:
        for name, value in table.items():
            key = f"{prefix}.{name}" if prefix else name
            is_none = isinstance(value, str) and value.lower() == "none"
            given = _shorten(spell(value, quote=True))
            section = self.schema.sections.get(key)
            if key in self.schema.settings:
                setting = self.schema.settings[key]
                convert = parse_value if is_none and setting.optional else from_toml
                value = convert(setting.annotation, value)
                self.set(key, value, given, origin)
            elif section is not None and isinstance(value, dict):
                if section.optional:
                    self.set(key, {}, given, origin)
                self.flat.setdefault(key, {})
                yield from self._add_table(key, value, origin)
            elif section is not None and section.optional and is_none:
                self.set(key, None, given, origin)
            else:
                yield Problem(key, unknown_key(self.schema, key), given, origin)

    def nested(self) -> dict[str, Any]:
        """The values as the nested dict that the root class validates."""
        tree: dict[str, Any] = {}
        for key in sorted(self.flat, key=lambda k: k.count(".")):
            *parents, leaf = key.split(".")
            table = tree
            for parent in parents:
                table = table.setdefault(parent, {})
            value = self.flat[key]
            table[leaf] = dict(value) if key in self.schema.sections and value is not None else value
        return tree


def _validated(root: type[ConfigT], values: _Values, problems: list[Problem]) -> ConfigT:
    try:
        config = root.model_validate(values.nested(), strict=True)
    except ValidationError as error:
        problems = [*problems, *_translate(error, values)]
        raise_problems(problems)
        raise
    raise_problems(problems)
    return config


def _translate(error: ValidationError, values: _Values) -> Iterator[Problem]:
    """Problems of pydantic's error, one for each key however many members of a union refused the value."""
    schema = values.schema
    for item in error.errors(include_url=False):
        key = _longest_key(schema, item["loc"])
        given, origin = values.given.get(key), values.origin.get(key)
        own_message = item["type"] in ("value_error", "assertion_error")
        message = str(item["ctx"]["error"]) if own_message else item["msg"]
        if item["type"] == "missing" and key.count(".") + 1 == len(item["loc"]):
            expected = schema.settings[key].expected if key in schema.settings else "a section"
            yield Problem(key, f"missing; expected {expected}; set it in the recipe or with --{key}")
        elif item["type"] == "finite_number":
            yield Problem(key, f"expected {schema.settings[key].expected}, not infinite or NaN", given, origin)
        elif key in schema.settings and not own_message:
            yield Problem(key, f"expected {schema.settings[key].expected}", given, origin)
        elif key in schema.settings:
            yield Problem(key, f"{message} (expected {schema.settings[key].expected})", given, origin)
        else:  # a combination: the validator of a section or of the root
            yield Problem(key, message)


def _longest_key(schema: Schema, loc: tuple[int | str, ...]) -> str:
    """Dotted key of the setting or section that a pydantic location lies in; `""` for the root."""
    key = ""
    for part in loc:
        longer = f"{key}.{part}" if key else str(part)
        if longer not in schema.settings and longer not in schema.sections:
            break
        key = longer
    return key


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_LENGTH else f"{text[: _SHOWN_LENGTH - 3]}..."
