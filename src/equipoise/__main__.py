"""The command `equipoise`, also as `python -m equipoise`. Ctrl-C ends it without a traceback, with exit code 130."""

import sys


def main() -> None:
    """Run the command line; does not return."""
    try:
        from equipoise.cli import main as command  # here, since it takes long enough to be interrupted

        command(prog_name="equipoise")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
