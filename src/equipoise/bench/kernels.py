"""`equipoise bench kernels`: the GPU kernels against their peers in the same run."""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.bench.group import bench
from equipoise.errors import ConfigError
from equipoise.exit_codes import exit_codes
from equipoise.options import Replace
from equipoise.outputs import check_out


@bench.command(
    help=(
        "Measure the kernels of the expert layers on this GPU.\n\n"
        "Grouped products over masters and replicas against one torch grouped_mm over weights that were concatenated "
        "beforehand, at the shapes of Qwen3-30B-A3B, Qwen3-235B-A22B, DeepSeek-V3 and others, balanced and Zipf loads, "
        "128 to 16 k tokens per expert; SwiGLU experts forward and backward against the unfused form; activations "
        "saved; permuting, combining and the router. Rates also as a share of the dense product's in the same run. "
        "Prints them, and writes them where --out says.\n\n"
        "With --tune: measure tile sizes first and write the best into the table that the kernels read.\n\n"
        "\b\nExamples:\n"
        "  equipoise bench kernels --out kernels.json\n"
        "  equipoise bench kernels --quick\n"
        "  equipoise bench kernels --tune\n"
        "  equipoise bench kernels --tune --kernels wgrad"
    ),
    short_help="Measure the GPU kernels.",
)
def kernels(
    quick: Annotated[bool, typer.Option("--quick", help="A few shapes.")] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Extend the table of tile sizes.")] = False,
    only: Annotated[
        str,
        typer.Option("--kernels", help="With --tune: these alone, separated by commas (forward, dgrad, wgrad, ...)."),
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Results file to write.")] = None,
    replace: Replace = False,
) -> None:
    with exit_codes():
        if out is not None:
            check_out(out, "kernels.json", replace)
        import torch

        from equipoise.kernels.tuning import KERNELS

        chosen = [name.strip() for name in only.split(",") if name.strip()]
        unknown = sorted(set(chosen) - set(KERNELS))
        if unknown:
            raise ConfigError(f"--kernels: {', '.join(unknown)} is none of {', '.join(KERNELS)}")
        from equipoise.bench import expert_kernels
        from equipoise.bench.kernel_timing import gpu
        from equipoise.bench.reroute_speed import permute_rows, router_rows
        from equipoise.bench.results import write_results
        from equipoise.kernels.triton_support import triton_problem

        if not gpu().is_available():
            raise ConfigError("the kernels are measured on a GPU, and torch finds none: run this on a machine with one")
        problem = triton_problem("cuda")
        if problem is not None:
            raise ConfigError(f"the kernels are written in Triton, which does not run here: {problem}")
        shapes = expert_kernels.QUICK_SHAPES if quick else expert_kernels.SHAPES
        if tune:
            from equipoise.bench.kernel_tuning import tune as tune_blocks

            tune_blocks(shapes, typer.echo, chosen or KERNELS)
        name = gpu().get_device_name()
        rows, summary = expert_kernels.study(shapes, say=typer.echo)
        device = torch.device("cuda")
        rows += permute_rows(device) + router_rows(device)
        for key, value in summary.items():
            typer.echo(f"{key:26} {value:.3f}" if isinstance(value, float) else f"{key:26} {value}")
        if out is not None:
            write_results(out, rows, summary, ["torch", "triton"], {"accelerator": name})
            typer.echo(f"written to {out}")
