"""What several commands take: a recipe with settings, the number of workers, a results file."""

from typing import Annotated, Any

import typer

RECIPE_AND_SETTINGS: dict[str, Any] = {
    "options_metavar": "[RECIPE] [--SECTION.KEY VALUE]... [OPTIONS]",
    "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True},
}
"""Of a command whose other arguments are read by `train/load.py`."""


def option_names(context: typer.Context) -> list[str]:
    """The options of the command that the help shows, such as `--out` and `--no-resume`."""
    shown = [p for p in context.command.get_params(context) if not getattr(p, "hidden", False)]
    return [name for p in shown for name in (*p.opts, *p.secondary_opts) if name.startswith("--")]


Replace = Annotated[bool, typer.Option("--replace", help="Write over the file of --out if it is there.")]
NprocPerNode = Annotated[
    int | None,
    typer.Option(min=1, show_default="one per accelerator device; 1 on CPU", help="Worker processes to start here."),
]
