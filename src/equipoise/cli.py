"""The command line: `equipoise train` and `equipoise doctor`.

Exit codes: 0 success; 1 the run failed; 2 the command or the configuration is wrong; 128 + n stopped by
signal n after saving. torch is imported only by the commands that need it, so that help is quick.
"""

import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

import equipoise
from equipoise import launch
from equipoise.bench.plan import bench
from equipoise.errors import ConfigError, EquipoiseError
from equipoise.train.load import load_config, split_recipe
from equipoise.train.recipes import is_path, list_recipes
from equipoise.train.schema import Schema, read_schema
from equipoise.train.stop import StoppedBySignal, StopSignals

if TYPE_CHECKING:
    from pydantic import BaseModel

    from equipoise.train.config import TrainConfig

EXIT_FAILED = 1
EXIT_USAGE = 2
RANK_0_SPEAKS_S = 2.0
RUNS = Path("runs")
WORKER_PROGRAM = (sys.executable, "-m", "equipoise")

main = typer.Typer(
    help="Train Mixture-of-Experts language models with expert parallelism.",
    epilog=(
        "\b\nStart here:\n"
        "  equipoise train demo --nproc-per-node 2   train a small model on two CPU processes\n"
        "  equipoise train --help                    recipes, settings, examples\n"
        "  equipoise doctor                          what was found on this machine, and what is used"
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


main.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"equipoise {equipoise.__version__}")
        raise typer.Exit


@main.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Train Mixture-of-Experts language models with expert parallelism."""


def _train_help() -> str:
    """Help of `train`: what it takes, examples, and the presets with their first comment lines."""
    recipes = list_recipes()
    width = max((len(r.name) for r in recipes), default=0)
    listed = "\n".join(f"  {r.name:{width}}  {r.summary}" for r in recipes) or "  (none installed)"
    return (
        "Train a model from RECIPE (a preset's name or a TOML file) and settings.\n\n"
        "Any setting of the recipe can be given as --section.key VALUE. With torchrun, or another launcher "
        "that sets RANK and WORLD_SIZE, the process joins the others; without, it starts the workers "
        "itself.\n\n"
        "\b\nExamples:\n"
        "  equipoise train demo --nproc-per-node 2\n"
        "  equipoise train demo --nproc-per-node 2 --train.steps 200 --optimizer.lr=1e-3 --out runs/mine\n"
        "  equipoise train my.toml --nproc-per-node 2 --train.no-compile     (false; bare --train.compile: true)\n"
        "  equipoise train runs/mine/config.toml --nproc-per-node 2     (repeat a run in a new folder)\n"
        "  torchrun --standalone --nproc-per-node 2 -m equipoise train demo --out runs/mine\n\n"
        f"\b\nRecipes:\n{listed}\n\n"
        "\b\nSettings:\n"
        "  equipoise train --help-config                 all keys with type, range, default, meaning\n"
        "  equipoise train --help-config model           those of one section\n\n"
        "Exit codes: 0 success; 1 the run failed; 2 the command or the configuration is wrong; 75 (of one rank) "
        "another rank was missing beyond the deadline; 128 + n stopped by signal n after saving."
    )


@main.command(
    help=_train_help(),
    short_help="Train a model from a recipe and settings.",
    options_metavar="[RECIPE] [--SECTION.KEY VALUE]... [OPTIONS]",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def train(
    context: typer.Context,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(
            min=1, show_default="one per accelerator device; 1 on CPU", help="Worker processes to start here."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(show_default="a new folder under runs/", help="Run folder: settings, metrics, checkpoints."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--no-resume",
            help="Continue from the newest checkpoint in the run folder, if there is one.",
        ),
    ] = True,
    help_config: Annotated[
        bool, typer.Option("--help-config", help="Print the settings (of the section named) and exit.")
    ] = False,
) -> None:
    with _exit_codes():
        root = _root_class()
        if help_config:
            typer.echo(describe_settings(read_schema(root), context.args))
            return
        _train(root, context.args, nproc_per_node, out, resume)


def _root_class() -> "type[BaseModel]":
    from equipoise.train.config import TrainConfig

    return TrainConfig


def _train(
    root: "type[BaseModel]", arguments: list[str], nproc_per_node: int | None, out: Path | None, resume: bool
) -> None:
    recipe, overrides = split_recipe(root, arguments)
    config = load_config(root, recipe, overrides)
    joins = launch.has_launcher(os.environ)
    count = nproc_per_node or (1 if joins else launch.default_worker_count())
    if not joins:
        launch.check_worker_count(count)
    _check_world(config, launch.launched_world_size(os.environ) if joins else count)
    if out is None:
        out = _joined_run_dir(recipe, os.environ) if joins else _new_run_dir(recipe)
    options = ["--nproc-per-node", str(count), "--out", str(out), "--resume" if resume else "--no-resume"]
    command = ["train", *arguments, *options]
    run = functools.partial(_run_here, cast("TrainConfig", config), out, ["equipoise", *command], resume)
    if joins:
        if launch.is_own_worker(os.environ):
            launch.end_with_parent()
        run()
    elif count == 1:
        with launch.world_of_one():
            run()
    else:
        launch.launch(count, [*WORKER_PROGRAM, *command])


def _run_here(config: "TrainConfig", out: Path, argv: Sequence[str], resume: bool) -> None:
    """Train in this process; a signal that arrives meanwhile ends the command with its exit code."""
    from equipoise.train.run import run_training

    with StopSignals() as stop:
        run_training(config, out, argv, resume)
    stop.raise_if_requested()


def _check_world(config: Any, world_size: int) -> None:
    """Let the configuration refuse a world that it cannot be spread over, before any worker starts."""
    check = getattr(config, "check_world", None)
    if check is not None:
        check(world_size)


def _run_name(recipe: str | None) -> str:
    """Name of a recipe's run folder: the preset, the file's stem, or for a run's config.toml the run."""
    if recipe is None:
        return "train"
    if not is_path(recipe):
        return recipe
    path = Path(recipe)
    return path.resolve().parent.name if path.name == "config.toml" else path.stem


def _new_run_dir(recipe: str | None) -> Path:
    """Create and return the first free one of `runs/NAME`, `runs/NAME-2`, ..."""
    name = _run_name(recipe)
    number = 1
    while True:
        folder = RUNS / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise EquipoiseError(
                f"cannot create the run folder {folder}: {error.strerror}; choose another with --out DIR"
            ) from error


def _joined_run_dir(recipe: str | None, environment: Mapping[str, str]) -> Path:
    """The run folder when a launcher started this process: every rank must come to the same one."""
    job = environment.get("SLURM_JOB_ID") or environment.get("TORCHELASTIC_RUN_ID", "none")
    name = _run_name(recipe)
    return RUNS / (name if job == "none" else f"{name}-{job}")


def describe_settings(schema: Schema, sections: Sequence[str]) -> str:
    """Keys with type, range, default and help, of all sections or of the one named."""
    names = [name.replace("-", "_") for name in sections]
    for name in names:
        if name not in schema.sections:
            known = [key for key in schema.sections if key]
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"There is no section {name!r}; {hint}sections are: {', '.join(known)}")
    lines: list[str] = []
    for key, section in schema.sections.items():
        inside = any(key == name or key.startswith(f"{name}.") for name in names)
        settings = schema.settings_of(key)
        if (names and not inside) or not settings:
            continue
        lines += [f"[{key}]  {section.help}".rstrip() if key else "(no section)", ""]
        for setting in settings:
            lines.append(f"  --{setting.key}  ({setting.expected}; default {setting.default})")
            if setting.help:
                lines.append(f"      {setting.help}")
        lines.append("")
    return "\n".join(lines).rstrip()


@main.command(help="Say what was found on this machine, what is used, and why.")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of words.")] = False,
) -> None:
    from equipoise import doctor as examination

    with _exit_codes():
        report = examination.collect()
        typer.echo(examination.to_json(report) if as_json else examination.to_words(report))
        if report["problems"]:
            raise typer.Exit(EXIT_FAILED)


@contextlib.contextmanager
def _exit_codes() -> Iterator[None]:
    """Turn the project's errors into a message without traceback and the exit codes listed above."""
    try:
        yield
    except typer.Exit:
        raise
    except (StoppedBySignal, launch.LaunchStopped) as stop:
        raise typer.Exit(128 + stop.signal_number) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except EquipoiseError as error:
        _report(error)
        code = EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
        raise typer.Exit(getattr(error, "exit_code", code)) from None
    except Exception as error:
        launch.record_error(error)
        raise


def _report(error: EquipoiseError) -> None:
    """Print the message once: by the launching process if it can, else by rank 0 for configuration errors."""
    recorded = launch.record_error(error)
    if recorded and launch.is_own_worker(os.environ):
        return
    rank = os.environ.get("RANK", "0") if launch.has_launcher(os.environ) else None
    if isinstance(error, ConfigError) and rank not in (None, "0"):
        time.sleep(RANK_0_SPEAKS_S)  # a launcher may end rank 0, which has the same message, once this rank ends
        return
    where = f" (rank {rank})" if rank is not None and not isinstance(error, ConfigError) else ""
    typer.echo(f"Error{where}: {error}", err=True)
