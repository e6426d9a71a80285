"""The command line: `equipoise train`, `posttrain`, `view`, `trace`, `simulate`, `convert`, `serve`, `doctor`, `bench`.

torch is imported only by the commands that need it, so that help is quick.
"""

import functools
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

import equipoise
from equipoise import launch
from equipoise.bench import balance as _balance  # noqa: F401 - adds its command to the group
from equipoise.bench import calibrate as _calibrate  # noqa: F401
from equipoise.bench import kernels as _kernels  # noqa: F401
from equipoise.bench import plan as _plan  # noqa: F401
from equipoise.bench.group import bench
from equipoise.convert import convert
from equipoise.errors import ConfigError, EquipoiseError
from equipoise.exit_codes import EXIT_FAILED, exit_codes
from equipoise.options import RECIPE_AND_SETTINGS, NprocPerNode, Replace, option_names
from equipoise.outputs import check_out
from equipoise.run_files import CHECKPOINTS
from equipoise.serve_command import serve
from equipoise.trace.command import HELP as TRACE_HELP
from equipoise.trace.command import trace_model
from equipoise.train.load import load_config, split_recipe
from equipoise.train.recipes import is_path, list_recipes
from equipoise.train.resolved import check_run_folder, removed_if_empty
from equipoise.train.schema import Schema, read_schema
from equipoise.train.stop import StopSignals

if TYPE_CHECKING:
    from pydantic import BaseModel

    from equipoise.train.config import TrainConfig

RUNS = Path("runs")

Out = Annotated[
    Path | None,
    typer.Option(show_default="a new folder under runs/", help="Run folder: settings, metrics, checkpoints."),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume/--no-resume",
        help="Continue from the newest checkpoint in the run folder, if there is one.",
    ),
]
ResumeStep = Annotated[
    int | None,
    typer.Option(
        min=0,
        show_default="the newest",
        help="Continue from the checkpoint of this step; later ones are set aside, not deleted.",
    ),
]
HelpConfig = Annotated[
    bool, typer.Option("--help-config", help="Print the settings (of the sections or keys named) and exit.")
]
Typed = Annotated[str | None, typer.Option(hidden=True, help="The command line of whoever started this.")]

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
        "  equipoise train --help-config model           those of one section, or one key (train.steps)\n\n"
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
    out: Out = None,
    resume: Resume = True,
    resume_step: ResumeStep = None,
    help_config: HelpConfig = False,
    typed: Typed = None,
) -> None:
    _command("train", context, nproc_per_node, out, resume, resume_step, help_config, typed)


_POSTTRAIN_HELP = (
    "Post-train a model by reinforcement learning with verifiable rewards (GRPO).\n\n"
    "Each step generates groups of answers to prompts, rewards them by a function, and learns from them; trainer and "
    "engine have the same processes by turns. RECIPE and settings are those of `equipoise train`, with a section "
    "posttrain (docs/posttraining.md).\n\n"
    "\b\nExamples:\n"
    "  equipoise posttrain posttrain-demo --nproc-per-node 2\n"
    "  equipoise posttrain my.toml --nproc-per-node 2 --posttrain.prompts math.jsonl --posttrain.reward number_match\n"
    "  equipoise posttrain --help-config posttrain"
)


@main.command(
    help=_POSTTRAIN_HELP,
    short_help="Post-train a model by reinforcement learning (GRPO).",
    **RECIPE_AND_SETTINGS,
)
def posttrain(
    context: typer.Context,
    nproc_per_node: NprocPerNode = None,
    out: Out = None,
    resume: Resume = True,
    resume_step: ResumeStep = None,
    help_config: HelpConfig = False,
    typed: Typed = None,
) -> None:
    _command("posttrain", context, nproc_per_node, out, resume, resume_step, help_config, typed)


def _command(
    name: str,
    context: typer.Context,
    nproc_per_node: int | None,
    out: Path | None,
    resume: bool,
    resume_step: int | None,
    help_config: bool,
    typed: str | None,
) -> None:
    """`train` or `posttrain`."""
    with exit_codes():
        if not (context.args or nproc_per_node or out or help_config):
            typer.echo(f"{context.get_usage()}\n\nRecipes:\n{_listed_recipes()}\n", err=True)
            demo = "demo" if name == "train" else "posttrain-demo"
            raise ConfigError(
                f"no recipe and no settings: name a recipe, such as `equipoise {name} {demo} --nproc-per-node 2`; "
                f"`equipoise {name} --help` has more"
            )
        root = _root_class()
        if help_config:
            recipes = [recipe.name for recipe in list_recipes()]
            asked = [name for name in context.args if name not in recipes and not is_path(name)]
            typer.echo(describe_settings(read_schema(root), asked))
            return
        typed = typed or shlex.join(["equipoise", *sys.argv[1:]])
        _train(name, root, context.args, option_names(context), nproc_per_node, out, resume, resume_step, typed)


def _root_class() -> "type[BaseModel]":
    from equipoise.train.config import TrainConfig

    return TrainConfig


def _train(
    name: str,
    root: "type[BaseModel]",
    arguments: list[str],
    own_options: list[str],
    nproc_per_node: int | None,
    out: Path | None,
    resume: bool,
    resume_step: int | None,
    typed: str,
) -> None:
    if resume_step is not None and (out is None or not resume):
        raise ConfigError(
            "--resume-step names a checkpoint of an earlier run: give that run's folder with --out, without --no-resume"
        )
    recipe, overrides = split_recipe(root, arguments)
    config = load_config(root, recipe, overrides, options=own_options)
    count, world_size = launch.choose_worker_count(nproc_per_node)
    _check_world(name, config, world_size)
    joins = launch.has_launcher(os.environ)
    made = not joins and (out is None or not out.exists())
    if out is None:
        out = _joined_run_dir(recipe, os.environ) if joins else _new_run_dir(recipe)
    options = ["--nproc-per-node", str(count), "--out", str(out), "--resume" if resume else "--no-resume"]
    if resume_step is not None:
        options += ["--resume-step", str(resume_step)]
    command = [name, *arguments, *options]
    run = functools.partial(
        _run_here, name, cast("TrainConfig", config), out, ["equipoise", *command], resume, typed, resume_step
    )
    with removed_if_empty(out, made):
        if not joins:  # else the ranks look together
            check_run_folder(out, resume, resume_step)
            _check_start(name, config, count, out / CHECKPOINTS, resume_step)
        launch.start(count, [*command, "--typed", typed], run)


def _run_here(
    name: str, config: "TrainConfig", out: Path, argv: Sequence[str], resume: bool, typed: str, resume_step: int | None
) -> None:
    """Train in this process; a signal that arrives meanwhile ends the command with its exit code."""
    run: Callable[..., None]
    if name == "posttrain":
        from equipoise.posttrain.run import run_posttraining as run
    else:
        from equipoise.train.run import run_training as run

    with StopSignals(None if launch.is_own_worker(os.environ) else launch.tell_of_stop) as stop:
        run(config, out, argv, resume, typed, resume_step)
    stop.raise_if_requested()


def _check_world(name: str, config: Any, world_size: int) -> None:
    """Let the configuration refuse a world that it cannot be spread over, before any worker starts."""
    check = getattr(config, "check_world", None)
    if check is not None:
        check(world_size)
    if name == "posttrain":
        from equipoise.posttrain.run import check_settings

        check_settings(config, world_size)
    elif getattr(config, "posttrain", None) is not None:
        raise ConfigError(
            "the settings have a section posttrain: run them with `equipoise posttrain`, or give --posttrain none to "
            "train on text"
        )


def _check_start(name: str, config: Any, count: int, checkpoints: Path, resume_step: int | None) -> None:
    """Let the configuration refuse what can be known before any worker starts."""
    if name == "posttrain":
        from equipoise.posttrain.run import check_start

        check_start(config, count, checkpoints, resume_step)
        return
    check = getattr(config, "check_start", None)
    if check is not None:
        check(count, checkpoints, resume_step)


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
    """Keys with type, range, default and help, of all sections or of those named; a name may be a single key."""
    names = [name.removeprefix("--").replace("-", "_") for name in sections]
    single = {name for name in names if any(s.key == name for key in schema.sections for s in schema.settings_of(key))}
    for name in names:
        if name not in schema.sections and name not in single:
            known = [key for key in schema.sections if key]
            keys = [s.key for key in schema.sections for s in schema.settings_of(key)]
            near = get_close_matches(name, [*known, *keys], n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"There is no section or key {name!r}; {hint}sections are: {', '.join(known)}")
    lines: list[str] = []
    for key, section in schema.sections.items():
        inside = any(key == name or key.startswith(f"{name}.") for name in names)
        settings = schema.settings_of(key)
        if names and not inside:
            settings = [setting for setting in settings if setting.key in single]
        if not settings:
            continue
        lines += [f"[{key}]  {section.help}".rstrip() if key else "(no section)", ""]
        for setting in settings:
            lines.append(f"  --{setting.key}  ({setting.expected}; default {setting.default})")
            if setting.help:
                lines.append(f"      {setting.help}")
        lines.append("")
    return "\n".join(lines).rstrip()


_VIEW_HELP = """Show runs as a web page: curves, load of ranks and layers, replicas, traffic; two runs compared.

RUN is a run folder (also one that is still training), a load trace's folder or file, or a folder with runs in it. The
page works without a network. On another address than localhost it asks for a token, which is printed.

\b
Examples:
  equipoise view runs/demo
  equipoise view runs/off runs/on                compare them
  equipoise view runs/demo --export demo.html    one file to hand on
"""


@main.command(help=_VIEW_HELP, short_help="Show runs as a web page.")
def view(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="What to show.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8570,
    token: Annotated[
        str | None,
        typer.Option(show_default="made where the host is not localhost", help="What requests have to carry."),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write one HTML file instead, with all that it needs.")
    ] = None,
) -> None:
    with exit_codes():
        from equipoise.observe.view.command import view as show

        show(runs, host, port, token, export, typer.echo)


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


@main.command(
    help=(
        "Predict whether balancing will pay: replay the loads of a TRACE (a run folder) or of a workload through "
        "planners and a cost model, with no device and no model.\n\n"
        "\b\nExamples:\n"
        "  equipoise simulate runs/demo --ranks 2,4\n"
        "  equipoise simulate --workload W2 --imbalance 1.5 --ranks 8,64 --slots 1,2,4 --tolerance 0.01,0.05\n"
        "  equipoise simulate --workload lognormal --ranks 64 --domain-size 8 --planners exact_load,ultraep\n\n"
        "Workloads: W0 to W7 (balanced, hot_experts, hot_rank, spread, ragged_sources, zero_load_ranks, rotating, "
        "burst), or lognormal. Hardware: h200, h100 (assumed rates), or a file of `equipoise bench calibrate`."
    ),
    short_help="Predict whether balancing will pay.",
)
def simulate(
    trace: Annotated[str | None, typer.Argument(help="Run folder, trace folder, or one of its files.")] = None,
    workload: Annotated[str | None, typer.Option(help="W0 to W7, their names, or lognormal.")] = None,
    ranks: Annotated[str, typer.Option(show_default="the trace's, or 8", help="Sizes of the EP group.")] = "",
    slots: Annotated[str, typer.Option(help="Replica slots per rank.")] = "1,2",
    tolerance: Annotated[str, typer.Option(help="Tolerated excess over the mean rank load.")] = "0.01",
    planners: Annotated[str, typer.Option(help="Planners by name, or my_file.py:function.")] = "exact_load",
    hardware: Annotated[str, typer.Option(help="h200, h100, or a calibration file.")] = "h200",
    domain_size: Annotated[int, typer.Option(min=0, help="Ranks joined by a fast link; 0: all.")] = 0,
    copy_tokens: Annotated[
        int | None, typer.Option(min=0, show_default="the hardware's", help="Cost of a replica in rows of an expert.")
    ] = None,
    min_tokens: Annotated[int, typer.Option(min=1, help="Least rows of a replica.")] = 1,
    imbalance: Annotated[float, typer.Option(help="Largest over mean rank load of a workload.")] = 1.5,
    experts: Annotated[int, typer.Option(min=1, help="Experts of a workload.")] = 128,
    top_k: Annotated[int, typer.Option(min=1, help="Experts per token of a workload.")] = 8,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens-per-rank",
            "--tokens",
            min=1,
            show_default="a run's own; 8192 for a workload or a trace of `equipoise trace`",
            help="Tokens of each rank in a microbatch.",
        ),
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="MoE layers of a workload.")] = 48,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches of a workload.")] = 8,
    exact: Annotated[
        bool, typer.Option("--exact", help="The workload's shares to the row, as [synthetic_routing] lays them down.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of a workload's draws.")] = 0,
    hidden_size: Annotated[
        int | None, typer.Option(min=1, show_default="the trace's, or 2048", help="Features of a token.")
    ] = None,
    intermediate_size: Annotated[
        int | None, typer.Option(min=1, show_default="the trace's, or 768", help="Features inside an expert.")
    ] = None,
    steps: Annotated[str, typer.Option(show_default="all", help="First and last step of the trace, as 100,200.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write the rows to this JSON file.")] = None,
    replace: Replace = False,
) -> None:
    with exit_codes():
        from equipoise.simulate import command
        from equipoise.simulate.sweep import Sweep

        first_last = command.parse_numbers(steps, "--steps") if steps else None
        if first_last is not None and len(first_last) != 2:
            raise ConfigError(f"--steps is {steps!r}: expected the first and the last step, such as 100,200")
        if out is not None:
            check_out(out, "simulated.json", replace)
        rows, about = command.run(
            trace,
            workload,
            command.WorkloadSize(imbalance, experts, top_k, tokens, layers, microbatches, seed, exact),
            Sweep(
                ranks=command.parse_numbers(ranks, "--ranks") if ranks else (),
                planners=planners.split(","),
                slots=command.parse_numbers(slots, "--slots"),
                tolerances=command.parse_numbers(tolerance, "--tolerance", float),
                min_tokens=min_tokens,
                domain_size=domain_size,
                copy_tokens=copy_tokens,
            ),
            hardware,
            hidden_size,
            intermediate_size,
            None if first_last is None else (first_last[0], first_last[1]),
        )
        if out is not None:
            command.write_json(out, rows, about)
            typer.echo(f"written to {out}")


# After `train`, so that the list of commands begins with it.
main.add_typer(bench, name="bench")
main.command("trace", help=TRACE_HELP, short_help="Does a model of transformers need balancing?")(trace_model)
main.command()(convert)
main.command()(serve)
