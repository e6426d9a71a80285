"""What several commands take: a recipe with settings, the number of workers, a results file."""

from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.errors import ConfigError
from equipoise.files import try_writing

RECIPE_AND_SETTINGS: dict[str, Any] = {
    "options_metavar": "[RECIPE] [--SECTION.KEY VALUE]... [OPTIONS]",
    "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True},
}
"""Of a command whose other arguments are read by `train/load.py`."""


def option_names(context: typer.Context) -> list[str]:
    """The options of the command that the help shows, such as `--out` and `--no-resume`."""
    shown = [p for p in context.command.get_params(context) if not getattr(p, "hidden", False)]
    return [name for p in shown for name in (*p.opts, *p.secondary_opts) if name.startswith("--")]


def check_out(path: Path, example: str, replace: bool) -> None:
    """Makes the folder of a results file, before anything is computed or measured for it.

    Raises:
        ConfigError: no file can be written there; one is there and `replace` is not set; or `path` is a folder, where
            the message names the file `example` in it instead.
    """
    _make_parent(path)
    if path.is_dir():
        raise ConfigError(f"--out {path}: this is a folder; give the name of a file, such as {path / example}")
    if path.exists() and not replace:
        raise ConfigError(f"--out {path}: this is there already; choose another name, or give --replace as well")
    _try_parent(path)


def check_out_folder(path: Path) -> None:
    """Makes the folder in which `path` will be made, before anything is computed for it.

    Raises:
        ConfigError: it is there already, or cannot be made.
    """
    if path.exists():
        raise ConfigError(
            f"--out {path} exists; give a folder that does not, so that nothing is mixed with what is there"
        )
    _make_parent(path)
    _try_parent(path)


def _make_parent(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {path}: {path.parent} cannot be made: {error.strerror or error}") from error


def _try_parent(path: Path) -> None:
    try:
        try_writing(path.parent)
    except OSError as error:
        raise ConfigError(
            f"--out {path}: no file can be written into {path.parent}: {error.strerror or error}; choose another place"
        ) from error


Replace = Annotated[bool, typer.Option("--replace", help="Write over the file of --out if it is there.")]
NprocPerNode = Annotated[
    int | None,
    typer.Option(min=1, show_default="one per accelerator device; 1 on CPU", help="Worker processes to start here."),
]
