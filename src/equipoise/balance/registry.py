"""Planners by name, or from a researcher's own file."""

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import cast

from equipoise.balance.baselines import (
    EqualSplitPlanner,
    HistoryPlanner,
    LeastLoadedPlanner,
    NoPlanner,
    UltraEPPlanner,
)
from equipoise.balance.exact import ExactPlanner
from equipoise.balance.planner import ExactLoadPlanner
from equipoise.balance.protocol import Planner
from equipoise.errors import ConfigError

PLANNERS: dict[str, Callable[[], Planner]] = {
    "exact_load": ExactLoadPlanner,
    "none": NoPlanner,
    "equal_split": EqualSplitPlanner,
    "eplb": HistoryPlanner,
    "ultraep": UltraEPPlanner,
    "llep": LeastLoadedPlanner,
    "milp": ExactPlanner,
}
"""Makers of planners: a layer makes its own, since a planner may learn from that layer's loads."""


def planner_maker(name: str) -> Callable[[], Planner]:
    """A function that makes planners, for a name of `PLANNERS` or for `path/to/file.py:function`.

    The function of a file takes `(load_PE, settings)` and returns a `Placement`, as `Planner` says; a class in its
    place is instantiated without arguments for each layer. The file is imported once, now.

    Raises:
        ConfigError: an unknown name, a missing file, an import that fails, or no such function in it.
    """
    path, colon, attribute = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        if name in PLANNERS:
            return PLANNERS[name]
        raise ConfigError(f"no planner {name!r}: choose {', '.join(PLANNERS)}, or give your own as my_file.py:function")
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"planner {name!r}: there is no file {file.absolute()}")
    spec = importlib.util.spec_from_file_location(f"equipoise_planner_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"planner {name!r}: importing {file} failed with {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"planner {name!r}: {file} has no function {attribute!r}; it has {', '.join(names) or 'none'}"
        )
    return cast(Callable[[], Planner], found) if inspect.isclass(found) else lambda: found
