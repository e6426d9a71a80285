"""The command group `equipoise bench`; the modules of its commands add themselves."""

import typer

bench = typer.Typer(help="Measure parts of Equipoise.", no_args_is_help=True, rich_markup_mode=None)
