"""Adapters to other frameworks stay small, and say what they need."""

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.balance import BalanceConfig
from equipoise.errors import ConfigError
from equipoise.integrations import transformers as adapter
from equipoise.integrations.transformers_support import own_precision, refuse_unsupported, weights_as_computed


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


class Mesh:
    def __init__(self, size: int) -> None:
        self.size = lambda: size


class MuseSparkExperts(torch.nn.Module):
    """Stands for a family of transformers; what is asked of it can be changed."""

    def __init__(self, dtype: torch.dtype = torch.float32, extra: str | None = None, **described: Any) -> None:
        super().__init__()
        self.config = type("Config", (), {"model_type": "muse_spark"})()
        facts = {"has_gate": True, "has_bias": False, "is_transposed": False, "has_post_expert_norm": False}
        for name, value in (facts | described).items():
            if value is not None:
                setattr(self, name, value)
        for name in ("gate_up_proj", "down_proj", *([extra] if extra else [])):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(2, 4, 3, dtype=dtype), requires_grad=False))


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "tensor parallelism": ({}, 2, "needs tp_size 1, got 2"),
    "norm": ({"has_post_expert_norm": True}, 1, "norms each expert's output by weights of that expert"),
    "own way": ({"is_transposed": None}, 1, r"in a way of its own .*is_transposed.*dequantized"),
    "further parameter": ({"extra": "scale"}, 1, "have the parameters gate_up_proj, down_proj, scale"),
    "no gate after all": ({"has_gate": False}, 1, "replicas carry up_proj, down_proj"),
    "FP8": ({"dtype": torch.float8_e4m3fn}, 1, r"gate_up_proj is torch.float8_e4m3fn.*dequantized"),
    "packed bytes": ({"dtype": torch.uint8}, 1, r"gate_up_proj is torch.uint8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_family_has_and_balancing_cannot_do_is_refused_by_name(name: str) -> None:
    facts, tp_size, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        refuse_unsupported(MuseSparkExperts(**facts), Mesh(tp_size))  # type: ignore[arg-type]
    assert "MuseSparkExperts (model type 'muse_spark')" in str(caught.value)


@pytest.mark.slow  # its import takes seconds
def test_a_family_that_does_not_describe_its_experts_is_refused() -> None:
    pytest.importorskip("transformers.models.step3p7", reason="a family of transformers 5.24")
    from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

    class Small(dict):
        __getattr__ = dict.get

    small = {"num_local_experts": 2, "hidden_size": 4, "moe_intermediate_size": 3, "hidden_act": "silu"}
    experts = Step3p7Experts(Small(small))
    experts.config = Small(small)
    with pytest.raises(ConfigError, match=r"Step3p7Experts .*in a way of its own"):
        refuse_unsupported(experts, Mesh(1))  # type: ignore[arg-type]


def test_autocast_computes_experts_in_its_dtype_and_leaves_them_alone() -> None:
    experts = MuseSparkExperts(is_transposed=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), own_precision("cpu") as dtype:
        assert not torch.is_autocast_enabled("cpu")
        weights = weights_as_computed(experts, {"down_proj": lambda weight: weight + 1}, dtype)
    assert {name: (w.shape, w.dtype) for name, w in weights.items()} == dict.fromkeys(
        ("gate_up_proj", "down_proj"), ((2, 3, 4), torch.bfloat16)
    )
    assert weights["down_proj"].unique().tolist() == [1.0]
    with own_precision("cpu") as dtype:
        assert weights_as_computed(experts, {}, dtype)["down_proj"].dtype == torch.float32


def test_the_readme_shows_at_most_three_lines() -> None:
    page = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    (change,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    lines = change.splitlines()
    assert len(lines) <= 3
    assert all(line.startswith("+") for line in lines)
    ast.parse("\n".join(line[1:] for line in lines))
