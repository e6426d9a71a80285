"""The command line: `equipoise train`, `equipoise serve`, `equipoise convert`, `equipoise doctor`, `equipoise bench`.

torch is imported only by the commands that need it, so that help is quick.
"""

import functools
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

import equipoise
from equipoise import launch
from equipoise.bench import balance as _balance  # noqa: F401 - adds its command to the group
from equipoise.bench import kernels as _kernels  # noqa: F401
from equipoise.bench import plan as _plan  # noqa: F401
from equipoise.bench.group import bench
from equipoise.convert import convert
from equipoise.errors import ConfigError, EquipoiseError
from equipoise.exit_codes import EXIT_FAILED, exit_codes
from equipoise.options import RECIPE_AND_SETTINGS, NprocPerNode
from equipoise.serve_command import serve
from equipoise.train.load import load_config, split_recipe
from equipoise.train.recipes import is_path, list_recipes
from equipoise.train.schema import Schema, read_schema
from equipoise.train.stop import StopSignals

if TYPE_CHECKING:
    from pydantic import BaseModel

    from equipoise.train.config import TrainConfig

RUNS = Path("runs")

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
main.command()(convert)
main.command()(serve)


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


def _listed_recipes() -> str:
    """The presets with their first comment lines."""
    recipes = list_recipes()
    width = max((len(r.name) for r in recipes), default=0)
    return "\n".join(f"  {r.name:{width}}  {r.summary}" for r in recipes) or "  (none installed)"


def _train_help() -> str:
    """Help of `train`: what it takes, examples, and the presets."""
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
        f"\b\nRecipes:\n{_listed_recipes()}\n\n"
        "\b\nSettings:\n"
        "  equipoise train --help-config                 all keys with type, range, default, meaning\n"
        "  equipoise train --help-config model           those of one section\n\n"
        "Exit codes: 0 success; 1 the run failed; 2 the command or the configuration is wrong; 75 the watchdog ended "
        "this process, whose operation hung (a command that started the workers itself exits with 1 then); 128 + n "
        "stopped by signal n after saving."
    )


@main.command(
    help=_train_help(),
    short_help="Train a model from a recipe and settings.",
    **RECIPE_AND_SETTINGS,
)
def train(
    context: typer.Context,
    nproc_per_node: NprocPerNode = None,
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
    typed: Annotated[str | None, typer.Option(hidden=True, help="The command line of whoever started this.")] = None,
) -> None:
    with exit_codes():
        if not (context.args or nproc_per_node or out or help_config):
            typer.echo(f"{context.get_usage()}\n\nRecipes:\n{_listed_recipes()}\n", err=True)
            raise ConfigError(
                "no recipe and no settings: name a recipe, such as `equipoise train demo --nproc-per-node 2`; "
                "`equipoise train --help` has more"
            )
        root = _root_class()
        if help_config:
            typer.echo(describe_settings(read_schema(root), context.args))
            return
        typed = typed or shlex.join(["equipoise", *sys.argv[1:]])
        _train(root, context.args, nproc_per_node, out, resume, typed)


def _root_class() -> "type[BaseModel]":
    from equipoise.train.config import TrainConfig

    return TrainConfig


def _train(
    root: "type[BaseModel]",
    arguments: list[str],
    nproc_per_node: int | None,
    out: Path | None,
    resume: bool,
    typed: str,
) -> None:
    recipe, overrides = split_recipe(root, arguments)
    config = load_config(root, recipe, overrides)
    count, world_size = launch.choose_worker_count(nproc_per_node)
    _check_world(config, world_size)
    if out is None:
        joins = launch.has_launcher(os.environ)
        out = _joined_run_dir(recipe, os.environ) if joins else _new_run_dir(recipe)
    options = ["--nproc-per-node", str(count), "--out", str(out), "--resume" if resume else "--no-resume"]
    command = ["train", *arguments, *options]
    run = functools.partial(_run_here, cast("TrainConfig", config), out, ["equipoise", *command], resume, typed)
    launch.start(count, [*command, "--typed", typed], run)


def _run_here(config: "TrainConfig", out: Path, argv: Sequence[str], resume: bool, typed: str) -> None:
    """Train in this process; a signal that arrives meanwhile ends the command with its exit code."""
    from equipoise.train.run import run_training

    with StopSignals() as stop:
        run_training(config, out, argv, resume, typed)
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

    with exit_codes():
        report = examination.collect()
        typer.echo(examination.to_json(report) if as_json else examination.to_words(report))
        if report["problems"]:
            raise typer.Exit(EXIT_FAILED)
