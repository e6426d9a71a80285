"""What a run folder says about how the run was started: `config.toml` and `run.json`."""

import contextlib
import errno
import json
import logging
import os
import platform
import shlex
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

import equipoise
from equipoise.checkpoint import layout
from equipoise.errors import ConfigError, EquipoiseError
from equipoise.files import try_writing, written_whole
from equipoise.run_files import CHECKPOINTS, CONFIG_FILE, HEADER_START, RUN_FILE, WRITTEN, holds_run
from equipoise.train.schema import Schema, read_schema, spell
from equipoise.train.values import parse_value

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

_LISTED = 5  # names in a message
_HELD_S = 0.2  # a lock of a run folder that is held for longer is a run's
_HEADER = HEADER_START + " To repeat it: equipoise {command} {file}\n\n"


def to_toml(config: BaseModel) -> str:
    """Every setting of `config`, defaults included, as a recipe; `parse_config` reads an equal one back.

    `None` is written as `"none"`. Raises `ConfigError` for a value that a recipe cannot hold: the text "none"
    in a setting where it means `None`, or `None` inside a list.
    """
    schema = read_schema(type(config))
    return tomli_w.dumps(_table(schema, "", config.model_dump(mode="json")))


def _table(schema: Schema, prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}.{name}" if prefix else name
        if key in schema.sections and value is not None:
            table[name] = _table(schema, key, value)
            continue
        setting = schema.settings.get(key)
        looks_none = value is None or (isinstance(value, str) and value.lower() == "none")
        if setting is not None and looks_none and setting.optional:
            read_back = parse_value(setting.annotation, "none" if value is None else value)
            if read_back is None and value is None:
                value = "none"
            elif read_back != value:
                if value is None and setting.default == "none":
                    continue
                raise ConfigError(f"{key} = {spell(value, quote=True)}: a recipe would read this as {read_back!r}")
        elif value is None:
            value = "none"
        if _holds_none(value):
            raise ConfigError(f"{key} = {value!r}: a recipe cannot hold none inside a list or a table")
        table[name] = value
    return table


def _holds_none(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_none(v) for v in value.values())
    if isinstance(value, list):
        return any(_holds_none(v) for v in value)
    return value is None


def save_resolved(config: BaseModel, run_dir: str | os.PathLike[str], argv: Sequence[str], typed: str = "") -> None:
    """Write `config.toml` and `run.json` into `run_dir`, creating it. Call it on one rank only.

    Each file is written beside its place and renamed, so that a reader never sees half of one.
    """
    folder = Path(run_dir)
    _make_folder(folder)
    command = "train" if getattr(config, "posttrain", None) is None else "posttrain"
    header = _HEADER.format(command=command, file=shlex.quote(str(folder / CONFIG_FILE)))
    resolved, described = header + to_toml(config), json.dumps(describe_run(argv, typed), indent=2) + "\n"
    with writing(folder):
        for name, text in ((CONFIG_FILE, resolved), (RUN_FILE, described)):
            with written_whole(folder / name) as partial:
                partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def removed_if_empty(folder: Path, made: bool) -> Iterator[None]:
    """Removes `folder` afterwards if nothing is in it, where this run `made` it and no other holds it: a run that
    failed before it had anything to keep leaves nothing."""
    try:
        yield
    finally:
        if made:
            with contextlib.suppress(OSError, ConfigError), _locked(folder):  # something is in it, or it was never made
                folder.rmdir()


@contextlib.contextmanager
def hold_run_folder(folder: Path) -> Iterator[None]:
    """Keeps `folder`, which it makes, for this run while entered; on one rank only. Removes it again if it stays empty.

    Two runs in one folder would overwrite each other's checkpoints and mix their metrics. The system drops the lock
    however the process ends. Where the file system has no locks (some network ones) nothing is kept.

    Raises:
        ConfigError: another run on this machine is using the folder, it holds files of somebody else that a run would
            replace, or it cannot be made.
    """
    with _locked(folder, make=True) as made:
        others = _refuse_files_of_others(folder)
        if others:
            listed = ", ".join(others[:_LISTED]) + (
                f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
            )
            logger.info("the run folder %s holds other files, which stay as they are: %s", folder, listed)
        try:
            yield
        finally:
            if made:
                with contextlib.suppress(OSError):  # something is in it
                    folder.rmdir()


@contextlib.contextmanager
def _locked(folder: Path, shared: bool = False, make: bool = False) -> Iterator[bool]:
    """Holds the lock of a run folder that is there, or with `make` is made; a shared one only finds out whether a run
    holds it. Whether this call has made it.

    Only who holds the lock removes the folder, which can happen before this call has it: then the folder is made again.
    So what is locked is what lies at the path. Who removes it, or finds out, holds the lock for a moment only, for
    which this call waits.

    Raises:
        ConfigError: a run holds it, or it cannot be made.
        FileNotFoundError, NotADirectoryError: it is not there; only without `make`.
    """
    deadline, made, handle = time.monotonic() + _HELD_S, False, None
    while handle is None:
        try:
            made = make and (_make_folder(folder) or made)
            handle = _lock(folder, shared)
        except (FileNotFoundError, NotADirectoryError) as error:  # such as one removed meanwhile
            made = False
            if not make:
                raise
            if time.monotonic() > deadline:
                raise _unreadable(folder, error) from error
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"the run folder {folder} is in use by another run, which has not ended (see its {RUN_FILE}); "
                    "choose another with --out DIR"
                ) from None
            time.sleep(_HELD_S / 20)
        except OSError as error:
            raise _unreadable(folder, error) from error
    try:
        yield made
    finally:
        os.close(handle)


def _lock(folder: Path, shared: bool) -> int:
    """An open handle, with a lock where the system and the file system have locks. Raises BlockingIOError if another
    has it, and FileNotFoundError if the folder is not, or no longer, the one at its path."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError:
                pass
        if not os.path.samestat(os.fstat(handle), os.stat(folder)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    except BaseException:
        os.close(handle)
        raise
    return handle


def check_run_folder(folder: Path, resume: bool, resume_step: int | None) -> None:
    """Refuses a run folder in which the run cannot go on, before anything is read or made. Every rank may call it.

    Raises:
        ConfigError: see `hold_run_folder`; or the folder could not be made.
        CheckpointError: `resume_step` is not there, or without `resume` there is a checkpoint.
    """
    try:
        with _locked(folder, shared=True):  # so nobody removes it meanwhile
            _refuse_unwritable(folder, folder)
            _refuse_files_of_others(folder)
    except (FileNotFoundError, NotADirectoryError):
        _refuse_unwritable(next(path for path in folder.absolute().parents if path.exists()), folder)
    checkpoints = folder / CHECKPOINTS
    newest = next(reversed(layout.complete_folders(checkpoints)), None)
    if not resume:
        layout.refuse_any(checkpoints, newest)
    elif resume_step is not None and not (newest and layout.was_trained_since(newest, resume_step)):
        layout.complete_at(checkpoints, resume_step)


def _refuse_unwritable(nearest: Path, folder: Path) -> None:
    """`nearest` is `folder` itself, or what is there of the path to it."""
    try:
        if nearest.is_dir():
            try_writing(nearest)
            return
        why = "is a file"
    except OSError as error:
        why = f"cannot be written ({error.strerror or error})"
    raise ConfigError(f"the run folder {folder} cannot be made: {nearest} {why}; choose another with --out DIR")


def _make_folder(folder: Path) -> bool:
    """Whether it was not there yet."""
    try:
        try:
            folder.mkdir(parents=True)
            return True
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                if not stat.S_ISDIR(os.stat(folder).st_mode):
                    raise
            return False
    except OSError as error:
        raise ConfigError(
            f"the run folder {folder} cannot be made: {error.strerror or error}; choose another with --out DIR"
        ) from error


def _refuse_files_of_others(folder: Path) -> list[str]:
    """A folder with neither a run's settings nor its checkpoints is no run's: it may not hold anything that a run would
    replace or add to. Returns the names of what else such a folder holds."""
    try:
        if holds_run(folder):
            return []
        found = [name for name in WRITTEN if _has_content(folder / name)]
        others = sorted(path.name for path in folder.iterdir() if path.name not in WRITTEN)
    except OSError as error:
        raise _unreadable(folder, error) from error
    if found:
        raise ConfigError(
            f"{folder} holds {' and '.join(found)} that no run has written, and a run would replace or add to "
            f"{'it' if len(found) == 1 else 'them'}; choose another run folder with --out DIR"
        )
    return others


def _unreadable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the run folder {folder} cannot be read: {error.strerror or error}; choose another with --out DIR"
    )


def _has_content(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


def describe_run(argv: Sequence[str], typed: str = "") -> dict[str, Any]:
    """Commands, our variables, versions, source commit, host and start time (UTC, ISO 8601).

    `typed` is what the user typed, `argv` the command that repeats it, with choices such as the folder made.
    """
    return {
        "typed": typed or shlex.join(argv),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("EQUIPOISE_")},
        "command": shlex.join(argv),
        "argv": list(argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "working_directory": os.getcwd(),
        "hostname": socket.gethostname(),
        "platform": platform.platform(),
        "versions": {
            "equipoise": equipoise.__version__,
            "python": platform.python_version(),
            "torch": installed_version("torch"),
            "triton": installed_version("triton"),
        },
        "git_commit": source_commit(),
    }


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, without importing it; `None` when it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def source_commit() -> str | None:
    """Commit of the checkout that this package runs from; `None` without git or a checkout."""
    package = Path(equipoise.__file__).parent
    # The first command fails where the package merely lies inside somebody else's repository, in its .venv.
    for command in (["ls-files", "--error-unmatch", "__init__.py"], ["rev-parse", "HEAD"]):
        try:
            done = subprocess.run(
                ["git", "-C", str(package), *command], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
    return done.stdout.strip()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names `path` and what to do when the system refuses to write there: full, read-only, gone."""
    try:
        yield
    except OSError as error:
        raise EquipoiseError(
            f"cannot write {path}: {error.strerror or error}; check space and permissions, or choose another run "
            "folder with --out DIR"
        ) from error
