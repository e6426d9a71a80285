"""`python -m equipoise` is the same as the command `equipoise`."""

from equipoise.cli import main

if __name__ == "__main__":
    main(prog_name="equipoise")
