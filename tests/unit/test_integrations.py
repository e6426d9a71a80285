"""Adapters to other frameworks stay small, and say what they need."""

import ast
import sys
from pathlib import Path

import pytest

from equipoise.balance import BalanceConfig
from equipoise.errors import ConfigError
from equipoise.integrations import transformers as adapter


def number_of_code_lines(source: str) -> int:
    """Lines that are not blank, comments or docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [node.body[0] for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    texts = [text for text in texts if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)]
    skipped = {line for text in texts for line in range(text.lineno, (text.end_lineno or 0) + 1)}
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") for i, line in lines if i not in skipped)


def test_code_lines_are_counted() -> None:
    assert (
        number_of_code_lines('"""Two\nlines."""\n\nimport ast\n# no\n\ndef f():\n    """One."""\n    return 1  # yes\n')
        == 3
    )


def test_the_transformers_adapter_has_at_most_50_lines_of_code() -> None:
    assert number_of_code_lines(Path(adapter.__file__).read_text()) <= 50


def test_a_transformers_without_the_registry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accelerator is selected before transformers is imported."""
    order = []
    monkeypatch.setattr(adapter, "initialize_accelerator", lambda: order.append("selected"))
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    with pytest.raises(ConfigError, match=r"needs its version 5\.\d+ or later"):
        adapter.register()
    assert order == ["selected"]


def test_a_planner_that_learns_is_refused() -> None:
    with pytest.raises(ConfigError, match="eplb"):
        adapter.register(BalanceConfig(planner="eplb"))
