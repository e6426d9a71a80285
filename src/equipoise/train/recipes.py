"""Finding and reading recipes: presets by name from the package, or TOML files by path."""

import importlib.resources
import os
import re
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from equipoise.errors import ConfigError


@dataclass(frozen=True)
class RecipeInfo:
    """A preset's name, and the first comment line of its file as its description."""

    name: str
    summary: str


@dataclass(frozen=True)
class Layer:
    """The values of one TOML file, before validation."""

    origin: str
    """How messages name the file: `recipe demo`, or the path."""
    values: dict[str, Any]


def preset_folder() -> Traversable:
    """Folder of the presets that are installed with the package."""
    return importlib.resources.files("equipoise").joinpath("recipes")


def list_recipes(folder: Traversable | None = None) -> list[RecipeInfo]:
    """All presets by name; `folder` replaces the package's own."""
    folder = preset_folder() if folder is None else folder
    if not folder.is_dir():
        return []
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return [RecipeInfo(f.name.removesuffix(".toml"), _summary(f)) for f in files]


def _summary(file: Traversable) -> str:
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            return line.lstrip("#").strip()
    return ""


def read_layers(recipe: str | os.PathLike[str], folder: Traversable | None = None) -> list[Layer]:
    """The recipe's file and those that it extends, the deepest base first.

    `extends = "name"` names another preset, or a TOML file relative to the extending file. Raises
    `ConfigError` for a recipe that is missing, unreadable, not TOML, or that extends itself.
    """
    folder = preset_folder() if folder is None else folder
    layers: list[Layer] = []
    seen: list[str] = []
    wanted: str | None = os.fspath(recipe)
    base = Path()
    while wanted is not None:
        text, origin, base = _read_text(wanted, base, folder, extended_by=seen[-1] if seen else None)
        if origin in seen:
            raise ConfigError(f"{origin} extends itself: {' -> '.join([*seen, origin])}; remove one `extends`")
        seen.append(origin)
        values = parse_toml(text, origin)
        wanted = values.pop("extends", None)
        if wanted is not None and not isinstance(wanted, str):
            raise ConfigError(f"{origin}: extends = {wanted!r}: expected the name of one recipe or a TOML file")
        layers.append(Layer(origin, values))
    return layers[::-1]


def is_path(recipe: str) -> bool:
    """Whether a recipe names a file rather than a preset: it ends in `.toml` or holds a path separator."""
    return recipe.endswith(".toml") or "/" in recipe or os.sep in recipe


def _read_text(recipe: str, base: Path, folder: Traversable, extended_by: str | None) -> tuple[str, str, Path]:
    """Text, name for messages, and the folder that relative `extends` start from."""
    where = f" (extended by {extended_by})" if extended_by else ""
    if not is_path(recipe):
        names = [r.name for r in list_recipes(folder)]
        if recipe not in names:
            near = get_close_matches(recipe, names, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}? " if near else ""
            if Path(f"{recipe}.toml").is_file():
                hint = f"did you mean the file {recipe}.toml? "
            elif Path(recipe).exists():
                hint = f"a file must end in .toml or be given as ./{recipe}. "
            raise ConfigError(
                f"There is no recipe {recipe!r}{where}; {hint}presets are: {', '.join(names) or 'none'}. "
                "A TOML file of your own can be given by its path."
            )
        return folder.joinpath(f"{recipe}.toml").read_text(encoding="utf-8-sig"), f"recipe {recipe}", Path()
    path = base / Path(recipe).expanduser()
    try:
        return path.read_text(encoding="utf-8-sig"), str(path), path.parent
    except FileNotFoundError:
        reason = "there is no such file"
    except IsADirectoryError:
        reason = "this is a folder"
        if (path / "config.toml").is_file():
            reason += f"; to repeat the run in it, give {path / 'config.toml'}"
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text: {error}"
    except OSError as error:
        reason = error.strerror or str(error)
    raise ConfigError(f"Cannot read the recipe {path}{where}: {reason}")


def parse_toml(text: str, origin: str) -> dict[str, Any]:
    """TOML text as a dict; a syntax error becomes a `ConfigError` with file, line and column."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        place = re.search(r" \(at line (\d+), column (\d+)\)$", message)
        if place:
            line, column = int(place[1]), int(place[2])
            message = message[: place.start()]
        else:
            line, column = text.count("\n") + 1, len(text.rpartition("\n")[2]) + 1
            message = message.removesuffix(" (at end of document)")
        lines = text.splitlines()
        shown = lines[line - 1].strip() if line <= len(lines) else ""
        shown = f"\n  {shown}" if shown else ""
        raise ConfigError(f"{origin}, line {line}, column {column}: TOML syntax: {message}{shown}") from error
