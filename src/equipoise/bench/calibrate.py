"""`equipoise bench calibrate`: the rates of a machine for `equipoise simulate`, from training steps of a model."""

import functools
from pathlib import Path
from typing import Annotated

import typer

from equipoise import launch
from equipoise.bench.group import bench
from equipoise.exit_codes import exit_codes
from equipoise.options import RECIPE_AND_SETTINGS, NprocPerNode, Replace, option_names
from equipoise.outputs import check_out
from equipoise.train.load import load_config, split_recipe


@bench.command(
    help=(
        "Measure the rates that `equipoise simulate --hardware FILE` computes with.\n\n"
        "Times training steps of RECIPE (with one microbatch, random tokens and a learning rate of 0) under loads that "
        "are laid down: no rows at all, even ones, a rank with few tokens, a hot rank, few experts, rows that stay or "
        "all leave, with and without replicas. The rates that explain these times best are written. They hold for this "
        "machine, these ranks and, as to the rest of a step, this model.\n\n"
        "\b\nExample:\n"
        "  equipoise bench calibrate demo --nproc-per-node 2 --out laptop.json\n"
        "  equipoise simulate runs/demo --hardware laptop.json"
    ),
    short_help="Measure the rates for `equipoise simulate`.",
    **RECIPE_AND_SETTINGS,
)
def calibrate(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Calibration file to write.")],
    nproc_per_node: NprocPerNode = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which the loads take turns.")] = 3,
    replace: Replace = False,
) -> None:
    with exit_codes():
        from equipoise.bench.calibrate_run import check_study, run_calibration
        from equipoise.train.config import TrainConfig

        recipe, overrides = split_recipe(TrainConfig, context.args)
        count, world_size = launch.choose_worker_count(nproc_per_node)
        config = load_config(TrainConfig, recipe, overrides, options=option_names(context))
        config = check_study(config, world_size)
        check_out(out, "calibration.json", replace)
        arguments = ["bench", "calibrate", *context.args, "--nproc-per-node", str(count)]
        arguments += ["--rounds", str(rounds), "--out", str(out), *(["--replace"] if replace else [])]
        launch.start(count, arguments, functools.partial(run_calibration, config, rounds, out))
