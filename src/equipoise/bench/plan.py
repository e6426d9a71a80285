"""`equipoise bench plan`: how well a planner balances, and how long a plan takes."""

from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.bench.group import bench
from equipoise.exit_codes import exit_codes
from equipoise.options import Replace
from equipoise.outputs import check_out

Found = tuple[list[dict[str, Any]], dict[str, Any]]
"""Rows and summary of a results file."""


@bench.command(
    help=(
        "Measure a planner. What is measured is printed, and written where --out says.\n\n"
        "With --quality: largest over mean rank load on synthetic loads (lognormal, Zipf, one hot rank) at 8 ranks x "
        "32, 8 x 128 and 64 x 256 experts, against a lower bound, an UltraEP-style planner and, on small loads, the "
        "optimum (needs scipy).\n\n"
        "Without: on a GPU the times of one whole plan, with the forms that the kernel replaces, 8 x 32 to 64 x 512, "
        "and of the reroute. Elsewhere, and for your own planner, the processor time of one plan.\n\n"
        "\b\nExamples:\n"
        "  equipoise bench plan --quality --seed 0 --out quality.json\n"
        "  equipoise bench plan --quality --planner my_file.py:my_planner"
    )
)
def plan(
    quality: Annotated[bool, typer.Option("--quality", help="Study the quality; takes a few minutes.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all draws.")] = 0,
    planner: Annotated[
        str, typer.Option(help="A planner's name, or FILE.py:FUNCTION of (load_PE, settings).")
    ] = "exact_load",
    loads: Annotated[int, typer.Option(min=15, help="Loads per size.")] = 1000,
    small_loads: Annotated[int, typer.Option(min=1, help="Small loads that are compared with the optimum.")] = 200,
    out: Annotated[Path | None, typer.Option(help="Results file to write.")] = None,
    replace: Replace = False,
) -> None:
    with exit_codes():
        if out is not None:
            check_out(out, "plan.json", replace)
        import torch

        from equipoise.accelerator import get_accelerator
        from equipoise.balance.registry import planner_maker
        from equipoise.bench.results import write_results

        torch.set_num_threads(1)  # plans are small: threads would only wait for each other
        make_planner = planner_maker(planner)
        packages, hardware = ["torch"], {}
        if quality:
            from equipoise.balance.quality import study

            rows, summary = study(make_planner, planner, seed, loads, small_loads, say=typer.echo)
            packages.append("scipy")
        elif planner == "exact_load" and get_accelerator().device().type == "cuda":
            rows, summary = _device_speed(seed)
            packages.append("triton")
            hardware["accelerator"] = get_accelerator().device_name()
        else:
            rows, summary = _speed(make_planner, planner, seed)
        for key, value in summary.items():
            typer.echo(f"{key:26} {value:.5f}" if isinstance(value, float) else f"{key:26} {value}")
        if out is not None:
            write_results(out, rows, summary, packages, hardware)
            typer.echo(f"written to {out}")


def _speed(make_planner, name: str, seed: int) -> Found:
    """Processor time of one plan: a row for each size and number of slots, and no summary."""
    import numpy as np

    from equipoise.balance.protocol import PlannerSettings
    from equipoise.balance.quality import SIZES, Size, measure, synthetic_loads

    rows: list[dict[str, Any]] = []
    for size in (Size(2, 16, 4), Size(4, 32, 4), *SIZES):
        sample = list(synthetic_loads(size, 60, np.random.default_rng([seed, size.num_ranks])))
        for slots in (1, 2):
            ms = measure(make_planner(), sample, PlannerSettings(slots)).seconds * 1e3
            row = {"median_ms": np.median(ms), "p90_ms": np.quantile(ms, 0.9), "max_ms": ms.max()}
            rows.append({"planner": name, "size": size.name, "slots": slots} | {k: float(v) for k, v in row.items()})
            typer.echo(
                f"{size.name:7} R={slots}: median {row['median_ms']:.3f} ms, p90 {row['p90_ms']:.3f} ms, "
                f"max {row['max_ms']:.3f} ms"
            )
    return rows, {}


def _device_speed(seed: int) -> Found:
    from equipoise.accelerator import get_accelerator
    from equipoise.bench.plan_speed import study_speed
    from equipoise.bench.reroute_speed import reroute_rows

    accelerator = get_accelerator()
    rows, summary = study_speed(accelerator, seed, say=typer.echo)
    more_rows, more_summary = reroute_rows(accelerator.device())
    return rows + more_rows, {**summary, **more_summary}
