"""Base class of every configuration section.

A section is a frozen pydantic model that lives beside the class it configures. Unknown keys are errors, and
the docstring under each field is its help text and its entry in `docs/configuration.md`.
"""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Frozen, typo-proof settings; see the module docstring."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,  # no setting means anything at infinity, and JSON, as in checkpoints, cannot hold it
    )


def divisors(n: int) -> list[int]:
    """The numbers that divide n, ascending: the valid values that an error message offers."""
    return [d for d in range(1, n + 1) if n % d == 0]
