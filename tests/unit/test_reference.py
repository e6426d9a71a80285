"""The configuration reference says what the classes say."""

from pathlib import Path

import pytest
from toy_config import ToyConfig

from equipoise.train.reference import render_reference

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


@pytest.mark.parametrize(
    "row",
    [
        "| `model.num_experts` | int >= 1 and <= 1024 | `4` | Logical experts of a layer. |",
        "| `model.window` | int, or none | `none` | Attention window in tokens; none attends to all. |",
        "| `model.mlp_only_layers` | list of int | `[]` | Layers without experts. |",
        "| `train.compile` | true or false | `false` | Whether to compile \\| fuse the model. |",
        '| `train.recompute` | true or false, or "auto" | `"auto"` |  |',
        "| `optimizer.lr` | float > 0 and < 1 | `0.001` | Peak learning rate. |",
        '| `optimizer.schedule` | one of "cosine", "constant" | `"cosine"` |  |',
        '| `data.precision` | one of "fp32", "bf16" | `"fp32"` |  |',
        "| `data.weights` | table of float by name | `{}` |  |",
        "| `label` | text, or none | `none` |  |",
    ],
)
def test_a_row_holds_key_range_default_and_help(row: str) -> None:
    assert row in render_reference(ToyConfig).splitlines()


def test_sections_come_in_the_order_of_the_classes_with_their_docstrings() -> None:
    page = render_reference(ToyConfig)
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert titles == [
        *("## General", "## model", "## data", "## train", "## optimizer", "## balance"),
    ]
    assert "## model\n\nShape of the model.\n\n| key" in page
    assert "Off unless set: `--balance` alone switches it on, `none` off." in page


def test_the_committed_page_is_up_to_date() -> None:
    config = pytest.importorskip("equipoise.train.config", exc_type=ImportError)
    assert PAGE.read_text() == render_reference(config.TrainConfig), (
        "renew it: python -m equipoise.train.reference > docs/configuration.md"
    )
