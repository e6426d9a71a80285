"""The metrics of a run: `metrics.jsonl` always, TensorBoard and Weights & Biases where asked for. Rank 0
writes.

docs/metrics.md lists the fields. Each line is one JSON object with a `step`; steps only grow, also over
resumes.
"""

import json
import math
import os
import sys
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from pydantic import Field

from equipoise.config import Config
from equipoise.errors import ConfigError
from equipoise.files import free_name, written_whole
from equipoise.train.resolved import writing

FILE_NAME = "metrics.jsonl"
PREVIOUS_NAME = "metrics.previous.jsonl"
NONFINITE = "nonfinite"


class MetricsConfig(Config):
    """What is recorded of a run, how often and where."""

    log_every: int = Field(default=1, ge=1)
    """Optimizer steps between lines of metrics.jsonl and of the console."""

    per_layer: bool = True
    """Write the load statistics of every MoE layer, not only their summary."""

    peak_flops: float | None = Field(default=None, gt=0)
    """FLOP/s of one device that MFU refers to. By default the datasheet's, on CPU a short measurement."""

    tensorboard: bool = False
    """Also write TensorBoard event files into the run folder (needs equipoise[tensorboard])."""

    wandb: bool = False
    """Also log to Weights & Biases (needs equipoise[wandb]); its own environment variables apply."""

    wandb_project: str = Field(default="equipoise", min_length=1)
    """Project that the Weights & Biases run belongs to."""


def refuse_missing_packages(config: MetricsConfig) -> None:
    """Raises ConfigError, before a run starts, when a package that was asked for is not installed."""
    for package in ("tensorboard", "wandb"):
        if getattr(config, package) and package not in sys.modules and find_spec(package) is None:
            raise ConfigError(
                f"metrics.{package} is on but the package {package} is not installed. "
                f"Install it with: pip install 'equipoise[{package}]', or switch metrics.{package} off."
            )


class _Sink(Protocol):
    def write(self, step: int, scalars: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Writes the metrics of one run folder; made on rank 0 only, closed at the end or as a context manager.

    `resumed_step` is the step of the checkpoint that the run continues from; lines of later steps, which will
    be trained again, are cut off. 0 is a run that starts anew: a file that is there already becomes the first free one
    of metrics.previous.jsonl, metrics.previous-2.jsonl, .... `run_config` is shown with the run by Weights & Biases.
    Raises ConfigError if a package that was asked for is missing.
    """

    def __init__(
        self,
        directory: Path,
        config: MetricsConfig,
        resumed_step: int = 0,
        run_config: dict[str, Any] | None = None,
    ) -> None:
        directory = Path(directory)
        self.path = directory / FILE_NAME
        self._config = config
        self._last_step = -1
        self._sinks: list[_Sink] = []
        with writing(self.path):
            if config.tensorboard:
                self._sinks.append(_TensorBoard(directory, resumed_step))
            if config.wandb:
                self._sinks.append(_WeightsAndBiases(directory, config.wandb_project, run_config or {}))
            directory.mkdir(parents=True, exist_ok=True)
            if resumed_step > 0:
                self._last_step = cut_after(self.path, resumed_step)
            elif self.path.exists() and self.path.stat().st_size > 0:
                self.path.rename(free_name(directory / PREVIOUS_NAME))
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    @property
    def position(self) -> int:
        """Bytes written so far, for the checkpoint."""
        return self.path.stat().st_size

    def sync(self) -> None:
        """Waits until all lines are on storage, so that a checkpoint never outlives the lines before it."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def write(self, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """Appends one line: `step` and `values`, whose numbers, lists and dicts may hold 0-d and 1-d tensors.

        NaN and infinity become null and their fields are listed under `nonfinite`. Returns what was written.
        Raises ValueError if `step` is not later than the last one.
        """
        if step <= self._last_step:
            raise ValueError(
                f"metrics of step {step} after those of step {self._last_step}: one line per step, in order"
            )
        if not self._config.per_layer:
            values = {name: value for name, value in values.items() if name != "layers"}
        plain = {name: _plain(value) for name, value in values.items()}
        nonfinite: list[str] = []
        record = {"step": step, **{name: _finite(value, name, nonfinite) for name, value in plain.items()}}
        if nonfinite:
            record[NONFINITE] = nonfinite
        with writing(self.path):
            _write_whole(self._file, (json.dumps(record, allow_nan=False) + "\n").encode())
        self._last_step = step
        if self._sinks:
            scalars = dict(_scalars("", plain))
            for sink in self._sinks:
                sink.write(step, scalars)
        return record

    def close(self) -> None:
        """Flushes and closes everything; harmless when repeated."""
        self._file.close()
        for sink in self._sinks:
            sink.close()
        self._sinks = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _write_whole(file: FileIO, data: bytes) -> None:
    """Unbuffered, so that what a full disk refused is not tried again when the file is closed."""
    while data:
        data = data[file.write(data) :]


def cut_after(path: Path, step: int) -> int:
    """Removes lines of later steps from a metrics file, and what a killed run left of a line. No file is no
    error.

    Returns the last step that remains, -1 if none does. The file is replaced as a whole, so it is never half
    cut.
    """
    if not path.exists():
        return -1
    kept, last = [], -1
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            line_step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if line.endswith(b"\n") and last < line_step <= step:
            kept.append(line)
            last = line_step
    with written_whole(path) as partial:
        partial.write_bytes(b"".join(kept))
    return last


def _plain(value: Any) -> Any:
    """Numbers, texts, lists and dicts of a value that may hold tensors or arrays."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _finite(value: Any, name: str, nonfinite: list[str]) -> Any:
    """`value` with null in place of NaN and infinity; the field's name is added to `nonfinite` once."""
    if isinstance(value, float) and not math.isfinite(value):
        if name not in nonfinite:
            nonfinite.append(name)
        return None
    if isinstance(value, dict):
        return {key: _finite(item, f"{name}.{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item, name, nonfinite) for item in value]
    return value


def _scalars(prefix: str, value: Any) -> list[tuple[str, float]]:
    """Every number of a nested value with its path, list items by index."""
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in _scalars(f"{prefix}/{key}" if prefix else key, item)]
    if isinstance(value, list):
        return [pair for i, item in enumerate(value) for pair in _scalars(f"{prefix}/{i:03d}", item)]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return [(prefix, value)]
    return []


class _TensorBoard:
    def __init__(self, directory: Path, resumed_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"metrics.tensorboard is on but the package tensorboard cannot be imported ({error}). "
                "Install it with: pip install 'equipoise[tensorboard]', or switch metrics.tensorboard off."
            ) from error
        purge_step = resumed_step + 1 if resumed_step else None  # hides later steps of the run that is resumed
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=purge_step)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, directory: Path, project: str, run_config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"metrics.wandb is on but the package wandb cannot be imported ({error}). "
                "Install it with: pip install 'equipoise[wandb]', or switch metrics.wandb off."
            ) from error
        directory.mkdir(parents=True, exist_ok=True)
        known = directory / "wandb_run_id"  # so that a resumed run continues its curve
        run_id = known.read_text().strip() if known.exists() else None
        self._run = wandb.init(
            project=project,
            dir=str(directory),
            config=run_config,
            id=run_id,
            resume="allow",
            name=directory.resolve().name,
        )
        known.write_text(self._run.id + "\n")

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log(scalars, step=step)

    def close(self) -> None:
        self._run.finish()
