"""Errors that end a run with a message for the user. Each says what was given, what was expected, what to do."""


class EquipoiseError(Exception):
    """Base of the errors below; the command line prints its text without a traceback and exits with 1."""

    told_by: int | None = None
    """The rank whose command line prints it, where several ranks raise it together; None: each that raises it."""


class ConfigError(EquipoiseError, ValueError):
    """A setting is unknown, malformed, or impossible in combination with another."""


class DataError(EquipoiseError, ValueError):
    """Training data is missing, empty, too short or unreadable."""


class CheckpointError(EquipoiseError):
    """A checkpoint cannot be written, or is missing, incomplete or of another model."""


class RankFailure(EquipoiseError, RuntimeError):  # noqa: N818 - the field says "rank failure"
    """A rank died or is late; names the group, the operation and who is missing."""


class NonFiniteLossError(EquipoiseError, ArithmeticError):
    """The loss or the gradient norm is NaN or infinite; parameters were left as they were before the step."""


class PlanError(EquipoiseError, ValueError):
    """A balancing plan breaks an invariant: tokens are lost, an expert sits twice on a rank, the load grows."""


class TraceError(EquipoiseError, ValueError):
    """A load trace is missing, cut, foreign or of another version, or cannot be written."""


class WeightUpdateError(EquipoiseError, RuntimeError):
    """An update of an engine's weights did not take place; says what the engine has now."""
