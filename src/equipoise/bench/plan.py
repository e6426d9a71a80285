"""`equipoise bench plan`: how well a planner balances, and how long a plan takes."""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.bench.group import bench
from equipoise.exit_codes import exit_codes
from equipoise.options import check_out


@bench.command(
    help=(
        "Measure a planner.\n\n"
        "With --quality: largest over mean rank load on synthetic loads (lognormal, Zipf, one hot rank) at 8 ranks x "
        "32, 8 x 128 and 64 x 256 experts, against a lower bound, an UltraEP-style planner and, on small loads, the "
        "optimum (needs scipy). Writes benchmarks/results/planner.json, or planner-NAME.json for your own.\n\n"
        "Without: on a GPU the times of one whole plan, with the forms that the kernel replaces, 8 x 32 to 64 x 512, "
        "and of the reroute; writes benchmarks/results/plan-DEVICE.json. Elsewhere, and for your own planner, the "
        "processor time of one plan.\n\n"
        "\b\nExamples:\n"
        "  equipoise bench plan --quality --seed 0\n"
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
    out: Annotated[Path | None, typer.Option(help="Results file of the times on a GPU.")] = None,
) -> None:
    with exit_codes():
        if out is not None:
            check_out(out, "plan.json")
        import torch

        from equipoise.accelerator import get_accelerator
        from equipoise.balance.registry import planner_maker

        torch.set_num_threads(1)  # plans are small: threads would only wait for each other
        make_planner = planner_maker(planner)
        if quality:
            _quality(make_planner, planner, seed, loads, small_loads)
        elif planner == "exact_load" and get_accelerator().device().type == "cuda":
            _device_speed(seed, out)
        else:
            _speed(make_planner, seed)


def _quality(make_planner, name: str, seed: int, loads: int, small_loads: int) -> None:
    from equipoise.balance.quality import study
    from equipoise.bench.results import results_folder, write_results

    rows, summary = study(make_planner, name, seed, loads, small_loads, say=typer.echo)
    own = name.rpartition(":")[2]
    file = "planner" if name == "exact_load" else f"planner-{own}"
    path = write_results(results_folder() / f"{file}.json", rows, summary, ["torch", "scipy"])
    for key, value in summary.items():
        typer.echo(f"{key:26} {value:.5f}" if isinstance(value, float) else f"{key:26} {value}")
    typer.echo(f"written to {path}")


def _speed(make_planner, seed: int) -> None:
    import numpy as np

    from equipoise.balance.protocol import PlannerSettings
    from equipoise.balance.quality import SIZES, Size, measure, synthetic_loads

    for size in (Size(2, 16, 4), Size(4, 32, 4), *SIZES):
        sample = list(synthetic_loads(size, 60, np.random.default_rng([seed, size.num_ranks])))
        for slots in (1, 2):
            ms = measure(make_planner(), sample, PlannerSettings(slots)).seconds * 1e3
            typer.echo(
                f"{size.name:7} R={slots}: median {np.median(ms):.3f} ms, p90 {np.quantile(ms, 0.9):.3f} ms, "
                f"max {ms.max():.3f} ms"
            )


def _device_speed(seed: int, out: Path | None) -> None:
    from equipoise.accelerator import get_accelerator
    from equipoise.bench.plan_speed import study_speed
    from equipoise.bench.reroute_speed import reroute_rows
    from equipoise.bench.results import device_word, results_folder, write_results

    accelerator = get_accelerator()
    rows, summary = study_speed(accelerator, seed, say=typer.echo)
    more_rows, more_summary = reroute_rows(accelerator.device())
    rows, summary = rows + more_rows, summary | more_summary
    name = accelerator.device_name()
    path = out or results_folder() / f"plan-{device_word(name)}.json"
    write_results(path, rows, summary, ["torch", "triton"], {"accelerator": name})
    for key, value in summary.items():
        typer.echo(f"{key:26} {value:.2f}")
    typer.echo(f"written to {path}")
