"""`equipoise bench balance`: training steps with balancing off, on, and with perfectly even routing, side by side."""

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equipoise import launch
from equipoise.bench.group import bench
from equipoise.errors import ConfigError
from equipoise.exit_codes import exit_codes
from equipoise.files import free_name
from equipoise.options import RECIPE_AND_SETTINGS, NprocPerNode, Replace, option_names
from equipoise.outputs import check_out
from equipoise.train.load import load_config, split_recipe

if TYPE_CHECKING:
    from equipoise.bench.balance_run import Study

OFF, ON, FORCED = "off", "on", "forced"
NATURAL = "natural"


@bench.command(
    help=(
        "Measure what exact-load balancing gains: training steps of RECIPE with balancing off, on, and with perfectly "
        "even routing (the ceiling), for several kinds of load.\n\n"
        "RECIPE is a preset's name, a TOML file, or the folder of a run, whose newest checkpoint and text are then "
        "used; otherwise weights are new and tokens random. Settings are given as for `equipoise train`. Nothing is "
        "trained: the learning rate is 0.\n\n"
        "\b\nExamples:\n"
        "  equipoise bench balance demo --nproc-per-node 2\n"
        "  equipoise bench balance runs/demo --nproc-per-node 2 --workloads natural,hot_rank --imbalance 1.8\n"
        "  equipoise bench balance demo --nproc-per-node 2 --modes off,on,ultraep,eplb,forced --layer\n\n"
        "\b\nWorkloads: natural (what the router chooses), balanced, hot_experts, hot_rank, spread, ragged_sources,\n"
        "zero_load_ranks, rotating, burst: see `equipoise train --help-config synthetic_routing`.\n"
        "Modes: off, on, forced, or the name of a planner, which is on with that planner."
    ),
    short_help="Measure what balancing gains.",
    **RECIPE_AND_SETTINGS,
)
def balance(
    context: typer.Context,
    nproc_per_node: NprocPerNode = None,
    modes: Annotated[str, typer.Option(help="Modes to compare, separated by commas.")] = f"{OFF},{ON},{FORCED}",
    workloads: Annotated[str, typer.Option(help="Workloads, separated by commas, or `all`.")] = "all",
    imbalance: Annotated[float, typer.Option(help="Largest over mean rank load of uneven workloads.")] = 1.5,
    slots: Annotated[
        str,
        typer.Option(help="Replica slots per rank, or `advise`: as many as the cost model finds worth it."),
    ] = "",
    layer: Annotated[
        bool, typer.Option("--layer", help="Forward and backward of one decoder layer, not a training step.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each mode in a round.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which the modes take turns.")] = 2,
    out: Annotated[
        Path | None,
        typer.Option(
            show_default="balance.json, or balance-2.json, ..., in the run folder or here",
            help="Results file to write.",
        ),
    ] = None,
    replace: Replace = False,
) -> None:
    with exit_codes():
        from equipoise.bench.balance_run import Study, run_study
        from equipoise.train.config import TrainConfig

        recipe, overrides = split_recipe(TrainConfig, context.args)
        run_dir = Path(recipe) if recipe is not None and Path(recipe).is_dir() else None
        source = "" if run_dir is None else run_dir / "config.toml"
        config = load_config(TrainConfig, source or recipe, overrides, options=option_names(context))
        count, world_size = launch.choose_worker_count(nproc_per_node)
        study = Study(
            modes=_names(modes, "--modes"),
            workloads=_names(workloads, "--workloads"),
            imbalance=imbalance,
            slots=_slots(slots),
            layer=layer,
            steps=steps,
            rounds=rounds,
            run_dir=run_dir,
            out=out or free_name((run_dir or Path()) / "balance.json"),
        )
        config = study.prepare(config, world_size)
        check_out(study.out, "balance.json", replace)
        arguments = ["bench", "balance", *context.args, "--nproc-per-node", str(count), *_options(study)]
        arguments += ["--replace"] if replace else []
        launch.start(count, arguments, functools.partial(run_study, study, config))


def _names(text: str, option: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ConfigError(f"{option} is empty: give names separated by commas")
    return names


def _slots(text: str) -> int | str:
    if text in ("", "advise"):
        return text
    if not re.fullmatch(r"[1-9]\d*", text):
        raise ConfigError(f"--slots is {text!r}: expected a whole number from 1, or `advise`")
    return int(text)


def _options(study: "Study") -> list[str]:
    """The command's own options, for the workers."""
    options = ["--modes", ",".join(study.modes), "--workloads", ",".join(study.workloads)]
    options += ["--imbalance", str(study.imbalance), "--steps", str(study.steps), "--rounds", str(study.rounds)]
    options += ["--out", str(study.out)]
    if study.slots:
        options += ["--slots", str(study.slots)]
    return [*options, "--layer"] if study.layer else options
