"""From the project's errors to messages and exit codes, for every command.

Exit codes: 0 success; 1 the run failed; 2 the command or the configuration is wrong; 75 the watchdog ended this
process; 128 + n stopped by signal n after saving.
"""

import contextlib
import os
import time
from collections.abc import Iterator

import typer

from equipoise import launch
from equipoise.errors import ConfigError, EquipoiseError
from equipoise.train.stop import StoppedBySignal

EXIT_FAILED = 1
EXIT_USAGE = 2
OTHER_SPEAKS_S = 2.0


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Turn the project's errors into a message without traceback and the exit codes listed above."""
    try:
        yield
    except typer.Exit:
        raise
    except (StoppedBySignal, launch.LaunchStopped) as stop:
        raise typer.Exit(128 + stop.signal_number) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except EquipoiseError as error:
        _report(error)
        code = EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
        raise typer.Exit(getattr(error, "exit_code", code)) from None
    except Exception as error:
        launch.record_error(error)
        raise


def _report(error: EquipoiseError) -> None:
    """Print the message once: by the launching process if it can, else by the rank that is to tell it. Configuration
    errors that were found before ranks could agree are printed by the first rank of each host, whose files and packages
    may differ."""
    recorded = launch.record_error(error)
    if recorded and launch.is_own_worker(os.environ):
        return
    rank = os.environ.get("RANK", "0") if launch.has_launcher(os.environ) else None
    speaks = True
    if rank is not None and error.told_by is not None:
        speaks = rank == str(error.told_by)
    elif rank is not None and isinstance(error, ConfigError):
        speaks = os.environ.get("LOCAL_RANK", rank) == "0"
    if not speaks:
        time.sleep(OTHER_SPEAKS_S)  # a launcher may end that rank, which has the message, once this rank ends
        return
    where = f" (rank {rank})" if rank is not None and not isinstance(error, ConfigError) else ""
    typer.echo("\n".join([f"Error{where}: {error}", *getattr(error, "__notes__", [])]), err=True)
