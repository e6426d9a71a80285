"""Log lines of a run: rank 0 tells what was chosen and why, other ranks only warnings, with their number."""

import logging
import os
import warnings


def configure_logging() -> None:
    """Sets up the `equipoise` loggers of this process once; the root logger is left to whoever embeds us."""
    rank = os.environ.get("RANK", "0")
    package = logging.getLogger("equipoise")
    if not package.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s" if rank == "0" else f"[rank {rank}] %(message)s"))
        package.addHandler(handler)
        package.propagate = False
    package.setLevel(logging.INFO if rank == "0" else logging.WARNING)
    # FSDP's and DTensor's notes on their own internals say nothing that a user could act on.
    warnings.filterwarnings("ignore", module=r"torch\.distributed\..*")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
