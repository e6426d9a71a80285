"""What several commands take: a recipe with settings, and the number of workers."""

from typing import Annotated, Any

import typer

RECIPE_AND_SETTINGS: dict[str, Any] = {
    "options_metavar": "[RECIPE] [--SECTION.KEY VALUE]... [OPTIONS]",
    "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True},
}
"""Of a command whose other arguments are read by `train/load.py`."""

NprocPerNode = Annotated[
    int | None,
    typer.Option(min=1, show_default="one per accelerator device; 1 on CPU", help="Worker processes to start here."),
]
