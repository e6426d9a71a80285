"""Where commands and benchmarks write what they found: never over what is there unless that is asked for."""

from pathlib import Path

from equipoise.errors import ConfigError
from equipoise.files import try_writing


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
