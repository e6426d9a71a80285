"""docs/api.md lists the public names: all of them can be imported, and no package offers others."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()
ROWS = re.findall(r"^\| `([\w.]+)` \| (\w+) \| (.+) \|$", PAGE, re.MULTILINE)
LISTED = {module: re.findall(r"`(\w+)`", names) for module, _, names in ROWS}


def declaring_modules() -> list[str]:
    """Modules that declare their public names with `__all__`."""
    source = ROOT / "src"
    files = [path for path in source.rglob("*.py") if re.search(r"^__all__\b", path.read_text(), re.MULTILINE)]
    return [".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__") for path in files]


@pytest.mark.parametrize("module", LISTED)
def test_listed_names_can_be_imported(module: str) -> None:
    loaded = importlib.import_module(module)
    assert LISTED[module], "a row without names"
    assert [name for name in LISTED[module] if not hasattr(loaded, name)] == []
    assert len(set(LISTED[module])) == len(LISTED[module])


@pytest.mark.parametrize("module", declaring_modules())
def test_what_a_module_declares_is_listed(module: str) -> None:
    assert sorted(LISTED.get(module, [])) == sorted(importlib.import_module(module).__all__)


def test_each_row_states_one_of_the_two_promises() -> None:
    assert {status for _, status, _ in ROWS} == {"supported", "provisional"}
    assert len(LISTED) == len(ROWS), "a module is listed twice"


def test_every_error_class_is_public() -> None:
    errors = importlib.import_module("equipoise.errors")
    classes = [name for name, value in vars(errors).items() if isinstance(value, type)]
    assert sorted(LISTED["equipoise.errors"]) == sorted(classes)
