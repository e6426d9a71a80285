"""`equipoise convert`: a model from one kind of folder to another, streaming."""

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from equipoise.exit_codes import exit_codes

if TYPE_CHECKING:
    from equipoise.models.families import ExpertLayout


class Target(StrEnum):
    """What to write."""

    HF = "hf"
    NATIVE = "native"


class Experts(StrEnum):
    """Layouts of the experts that can be written."""

    PER_EXPERT = "per_expert"
    FUSED = "fused"


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A Hugging Face or native folder, a checkpoint (step-<n>), or a run.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write; it may not be there yet.")],
    to: Annotated[Target, typer.Option("--to", help="Names and layout to write: the family's, or ours.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16, float8_e4m3 (blocks of 128 x 128) or int4 (routed experts, in groups); "
            "default: as in SRC."
        ),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(show_default="32", help="With --dtype int4: columns that share a factor.")
    ] = None,
    experts: Annotated[
        Experts | None,
        typer.Option(help="With --to hf: one tensor per expert (default, as on the Hub), or one for all of a layer."),
    ] = None,
    max_shard_gb: Annotated[float, typer.Option(min=1e-6, help="Largest file, in GB.")] = 5.0,
) -> None:
    """Convert a model between Hugging Face's files and ours. Nothing is held but the rows in work."""
    with exit_codes():
        from equipoise.checkpoint.hf import export, open_source, parse_dtype
        from equipoise.checkpoint.sizes import in_words
        from equipoise.errors import ConfigError
        from equipoise.train.progress import ByteProgress

        if to is Target.NATIVE and experts is not None:
            raise ConfigError("--experts is for --to hf: native folders have one tensor for all experts of a layer")
        wanted = parse_dtype(dtype, group_size)
        opened = open_source(source)
        started = time.monotonic()
        try:
            with ByteProgress(f"convert {source.name}") as progress:
                shard_bytes = int(max_shard_gb * 1e9)
                layout = cast("ExpertLayout | None", experts.value if experts is not None else None)
                export(opened, target, to.value, wanted, layout, shard_bytes, progress)
        finally:
            opened.close()
        size = sum(file.stat().st_size for file in target.iterdir())
        typer.echo(f"wrote {target}: {in_words(size)} in {time.monotonic() - started:.1f} s")
