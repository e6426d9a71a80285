"""Values of the training settings that would fail late, or never, are refused before a run starts."""

import pytest

from equipoise.errors import ConfigError
from equipoise.train.config import TrainConfig
from equipoise.train.load import load_config
from equipoise.train.schema import read_schema

NUMBERS = [key for key, setting in read_schema(TrainConfig).settings.items() if "float" in setting.expected]


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("key", NUMBERS)
def test_no_number_may_be_infinite(key: str, value: str) -> None:
    """A checkpoint could not hold it: the run would be lost at its first save."""
    given = f"0.5,{value}" if key == "optimizer.betas" else value
    with pytest.raises(ConfigError, match=key):
        load_config(TrainConfig, None, [f"--{key}={given}"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.seed", "99999999999999999999"),
        ("train.seed", "-1"),
        ("optimizer.betas", "0.9,1"),
        ("optimizer.betas", "-0.1,0.9"),
        ("parallel.timeout_s", "1e12"),
    ],
)
def test_what_torch_would_refuse_is_refused_with_its_key(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load_config(TrainConfig, None, [f"--{key}={value}"])
