"""What a tree of configuration classes contains, in words: dotted keys, types, ranges, defaults, help.

The loader's error messages, `equipoise train --help-config` and `docs/configuration.md` all read this one
description, so that none of them can drift from the classes.
"""

import enum
import inspect
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_TYPE_NAMES = {
    bool: "true or false",
    int: "int",
    float: "float",
    str: "text",
    Path: "path",
    type(None): "none",
}
_COLLECTIONS = (list, tuple, set, frozenset)


@dataclass(frozen=True)
class Setting:
    """One value of the tree that a recipe or the command line can set."""

    key: str
    """Dotted key, such as `train.steps`."""
    annotation: Any
    """Declared type, without the constraints that pydantic keeps in `FieldInfo.metadata`."""
    expected: str
    """Type and allowed range in words, such as `int >= 1, or none`."""
    default: str
    """Default value as the command line would spell it, or `required`."""
    help: str
    """The field's docstring on one line."""

    @property
    def optional(self) -> bool:
        """Whether `none` is a value of this setting."""
        return type(None) in union_members(self.annotation)

    @property
    def boolean(self) -> bool:
        """Whether the bare option means true, and its no- form false."""
        return bool in union_members(self.annotation)


@dataclass(frozen=True)
class Section:
    """One group of settings: the root (key `""`), or a field whose type is a configuration class."""

    key: str
    model: type[BaseModel]
    optional: bool
    """Whether the whole section can be `none`."""
    help: str


@dataclass(frozen=True)
class Schema:
    """All sections and settings of a root class, by dotted key, in the order of declaration."""

    sections: dict[str, Section]
    settings: dict[str, Setting]

    def settings_of(self, section: str) -> list[Setting]:
        """Settings that belong to `section` itself, not to the sections inside it."""
        return [s for s in self.settings.values() if s.key.rpartition(".")[0] == section]


def read_schema(root: type[BaseModel]) -> Schema:
    """Description of `root` and of every configuration class below it."""
    sections: dict[str, Section] = {"": Section("", root, optional=False, help=class_help(root))}
    settings: dict[str, Setting] = {}
    _read_into(sections, settings, "", root)
    return Schema(sections, settings)


def _read_into(sections: dict[str, Section], settings: dict[str, Setting], prefix: str, model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        key = f"{prefix}.{name}" if prefix else name
        members = union_members(field.annotation)
        models = [m for m in members if isinstance(m, type) and issubclass(m, BaseModel)]
        if len(models) == 1:
            help_text = one_line(field.description) or class_help(models[0])
            sections[key] = Section(key, models[0], optional=type(None) in members, help=help_text)
            _read_into(sections, settings, key, models[0])
        else:
            settings[key] = Setting(
                key=key,
                annotation=field.annotation,
                expected=describe_type(field.annotation, field.metadata),
                default=_default_text(field),
                help=one_line(field.description),
            )


def class_help(model: type[BaseModel]) -> str:
    """First paragraph of the class's own docstring on one line; empty when it has none."""
    own = model.__dict__.get("__doc__")
    return one_line(inspect.cleandoc(own).split("\n\n")[0]) if own else ""


def one_line(text: str | None) -> str:
    """`text` with every run of white space replaced by one space."""
    return " ".join((text or "").split())


def strip_annotated(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """`Annotated[T, a, b]` as `(T, (a, b))`, a type alias as its meaning, anything else as `(T, ())`."""
    metadata: tuple[Any, ...] = ()
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            metadata += annotation.__metadata__
            annotation = annotation.__origin__
        elif hasattr(annotation, "__value__"):  # `type Name = ...` of Python 3.12
            annotation = annotation.__value__
        else:
            return annotation, metadata


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Members of a union, each without `Annotated`; `(annotation,)` when it is not a union."""
    bare, _ = strip_annotated(annotation)
    if typing.get_origin(bare) in (typing.Union, types.UnionType):
        return tuple(inner for member in typing.get_args(bare) for inner in union_members(member))
    return (bare,)


def choices(annotation: Any) -> tuple[Any, ...]:
    """Values of a `Literal` or an `Enum`; empty for other types."""
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return tuple(member.value for member in annotation)
    return ()


def element_types(annotation: Any) -> Sequence[Any] | None:
    """Element types of a list, tuple or set (one repeated, or one per place); `None` for other types."""
    origin = typing.get_origin(annotation) or annotation
    if origin not in _COLLECTIONS and origin not in (Sequence, Iterable):
        return None
    return [a for a in typing.get_args(annotation) if a is not Ellipsis] or [Any]


def describe_type(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Type and allowed range in words: `int >= 1, or none`; `one of "adamw", "sgd"`; `list of int`."""
    bare, inner = strip_annotated(annotation)
    metadata = [*inner, *metadata]
    if typing.get_origin(bare) in (typing.Union, types.UnionType):
        members = sorted(typing.get_args(bare), key=lambda m: m is type(None))
        return ", or ".join(describe_type(m, () if m is type(None) else metadata) for m in members)
    if values := choices(bare):
        listed = ", ".join(spell(value, quote=True) for value in values)
        return listed if len(values) == 1 else f"one of {listed}"
    return " ".join([_type_words(bare), *_range_words(metadata)])


def _type_words(bare: Any) -> str:
    elements = element_types(bare)
    if elements is not None:
        origin = typing.get_origin(bare)
        if origin is tuple and Ellipsis not in typing.get_args(bare):
            return f"list of {len(elements)} values ({', '.join(describe_type(e) for e in elements)})"
        return "list" if elements[0] is Any else f"list of {describe_type(elements[0])}"
    if typing.get_origin(bare) is dict or bare is dict:
        args = typing.get_args(bare)
        return f"table of {describe_type(args[1])} by name" if args else "table"
    if bare is Any:
        return "any value"
    if isinstance(bare, type) and issubclass(bare, BaseModel):
        return f"section {bare.__name__}"
    return _TYPE_NAMES.get(bare) or str(getattr(bare, "__name__", bare))


def _range_words(metadata: Iterable[Any]) -> list[str]:
    """Constraints of annotated-types and pydantic in words: bounds first, then all others."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds: list[str] = []
    words: list[str] = []
    for item in metadata:
        if isinstance(item, FieldInfo):
            words += _range_words(item.metadata)
            continue
        bounds += [f"{sign} {spell(v)}" for n, sign in signs.items() if (v := getattr(item, n, None)) is not None]
        if (step := getattr(item, "multiple_of", None)) is not None:
            words.append(f"multiple of {spell(step)}")
        if (length := getattr(item, "min_length", None)) not in (None, 0):
            words.append(f"of length >= {length}")
        if (length := getattr(item, "max_length", None)) is not None:
            words.append(f"of length <= {length}")
        if (pattern := getattr(item, "pattern", None)) is not None:
            words.append(f"matching {pattern}")
        if getattr(item, "allow_inf_nan", None) is False:
            words.append("finite")
    return ([" and ".join(bounds)] if bounds else []) + words


def spell(value: Any, quote: bool = False) -> str:
    """`value` as the command line and the messages spell it; with `quote`, text in double quotes."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return spell(value.value, quote)
    if isinstance(value, (str, Path)):
        return f'"{value}"' if quote else str(value)
    if isinstance(value, BaseModel):
        return spell(value.model_dump(mode="json"), quote)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {spell(v, quote=True)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(spell(v, quote=True) for v in value) + "]"
    if isinstance(value, (set, frozenset)):
        return spell(sorted(value, key=str))
    return str(value)


def _default_text(field: FieldInfo) -> str:
    if field.default is not PydanticUndefined:
        return spell(field.default, quote=True)
    if field.default_factory is None:
        return "required"
    if field.default_factory_takes_validated_data:
        return "derived from the other settings"
    return spell(field.default_factory(), quote=True)  # type: ignore[call-arg]
