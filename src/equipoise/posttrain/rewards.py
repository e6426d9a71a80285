"""Rewards: from a prompt, its answer and what the model wrote to a number."""

import importlib
import importlib.util
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from equipoise.errors import ConfigError, DataError
from equipoise.posttrain.prompts import Problem

Reward = Callable[[str, str, str], float]
"""`(prompt, answer, text)` to a finite number; more is better. `text`: what the model wrote, without the end token."""

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


def exact_match(prompt: str, answer: str, text: str) -> float:
    """1 if the text is the answer, blanks around it aside."""
    return float(text.strip() == answer.strip())


def number_match(prompt: str, answer: str, text: str) -> float:
    """1 if the last number of the text equals the answer's last; commas inside a number are ignored."""
    found, wanted = (_NUMBER.findall(part) for part in (text, answer))
    if not found or not wanted:
        return 0.0
    return float(_value(found[-1]) == _value(wanted[-1]))


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def character_match(prompt: str, answer: str, text: str) -> float:
    """Share of the positions of the longer one of text and answer at which both have the same character."""
    longest = max(len(answer), len(text))
    return sum(a == b for a, b in zip(answer, text)) / longest if longest else 1.0


REWARDS: dict[str, Reward] = {f.__name__: f for f in (exact_match, number_match, character_match)}


def load_reward(name: str) -> Reward:
    """The reward of a name of `REWARDS`, of `path/to/file.py:function` or of `module:function`, which is imported now.
    Modules are also looked for in the working directory.

    Raises:
        ConfigError: an unknown name, a missing file, an import that fails, or no such function.
    """
    if name in REWARDS:
        return REWARDS[name]
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise ConfigError(
            f"posttrain.reward: there is no reward {name!r}: choose {', '.join(REWARDS)}, or give your own as "
            "my_file.py:function or module:function"
        )
    try:
        module = _load(place)
    except Exception as error:
        raise ConfigError(
            f"posttrain.reward {name!r}: importing {place} failed with {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"posttrain.reward {name!r}: {place} has no function {attribute!r}; it has {', '.join(names) or 'none'}"
        )
    return found


def _load(place: str) -> ModuleType:
    if not place.endswith(".py"):
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.append(here)
        return importlib.import_module(place)
    path = Path(place).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path.absolute()}")
    spec = importlib.util.spec_from_file_location(f"equipoise_reward_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def score(reward: Reward, name: str, problem: Problem, text: str) -> float:
    """The reward of an answer. Raises DataError, which names function and sample, for what it raises and for what is no
    finite number."""
    sample = f"prompt {problem.prompt[-80:]!r} ({problem.where}), answer {problem.answer[:80]!r}, text {text[:80]!r}"
    try:
        found = reward(problem.prompt, problem.answer, text)
    except Exception as error:
        raise DataError(f"the reward {name} raised {type(error).__name__}: {error}. It was given {sample}") from error
    try:
        value = float(found)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"the reward {name} gave {found!r}; expected a finite number. It was given {sample}")
    return value
