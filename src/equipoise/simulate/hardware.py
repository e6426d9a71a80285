"""What a machine costs: rates and fixed times, measured by `equipoise bench calibrate` or assumed."""

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from equipoise.balance.rules import MAX_COPY_TOKENS
from equipoise.errors import ConfigError

KIND = "equipoise.hardware"
VERSION = 1


@dataclass(frozen=True)
class ExpertSize:
    """One SwiGLU expert: three matrices of hidden_size x intermediate_size, `itemsize` bytes per number."""

    hidden_size: int
    intermediate_size: int
    itemsize: int = 2

    def __post_init__(self) -> None:
        if self.hidden_size < 1 or self.intermediate_size < 1 or self.itemsize < 1:
            raise ConfigError(
                f"an expert of hidden size {self.hidden_size} and intermediate size {self.intermediate_size} with "
                f"{self.itemsize} bytes per number: expected positive numbers; give --hidden-size and "
                "--intermediate-size where the trace does not know them"
            )

    @property
    def num_parameters(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def flop_per_row(self) -> int:
        """FLOP of one row through one expert, forward and backward."""
        return 6 * self.num_parameters

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's features."""
        return self.hidden_size * self.itemsize

    @property
    def copy_bytes(self) -> int:
        """Bytes that one replica moves in a step: weights for forward and backward, the gradient in FP32 back."""
        return self.num_parameters * (2 * self.itemsize + 4)

    @property
    def slot_bytes(self) -> int:
        """Memory of one replica slot: weights, and the gradient in FP32."""
        return self.num_parameters * (self.itemsize + 4)

    @property
    def saved_row_bytes(self) -> int:
        """Activations kept for the backward for each row: the input and both halves of the first product."""
        return (self.hidden_size + 2 * self.intermediate_size) * self.itemsize


def expert_size(hidden_size: int, intermediate_size: int, dtype: str) -> ExpertSize:
    """That of a model whose experts compute in `dtype` ("float32"; any other, or none, takes two bytes)."""
    return ExpertSize(hidden_size, intermediate_size, 4 if dtype == "float32" else 2)


@dataclass(frozen=True)
class Hardware:
    """Times of one rank; all of forward and backward together, per MoE layer and microbatch where nothing else is said.

    name: of the machine. source: how the numbers were found.
    flops_per_s: rate of the experts' products. shared_flops_per_s: where ranks share a processor's cores or memory, and
        so slow each other, the mean work of the ranks takes its time at this rate on top. expert_s: fixed time of each
        expert that has rows. tile_rows: rows of an expert are computed in multiples of this.
    source_bytes_per_s: rate at which a rank orders, packs and sums up its own tokens' rows, each counted once.
    exchange_s: fixed time of a layer's four exchanges of rows. link_bytes_per_s: rate between ranks of a domain,
        far_bytes_per_s between domains. full_duplex: sending and receiving do not slow each other.
    copy_s: fixed time of a replica's transfers on the busiest rank, copy_bytes_per_s their rate, copy_exposed the share
        of both that nothing hides.
    balance_s: fixed time of balancing: exchange of counts, planning, rerouting.
    rest_s: everything else of a step of one microbatch (attention, loss, optimizer). measured_with: sizes of the
        measurement, for the record; rest_s holds for them only.
    """

    name: str
    source: str
    flops_per_s: float = float("inf")
    shared_flops_per_s: float = float("inf")
    expert_s: float = 0.0
    tile_rows: int = 1
    source_bytes_per_s: float = float("inf")
    exchange_s: float = 0.0
    link_bytes_per_s: float = float("inf")
    far_bytes_per_s: float = float("inf")
    full_duplex: bool = True
    copy_s: float = 0.0
    copy_bytes_per_s: float = float("inf")
    copy_exposed: float = 1.0
    balance_s: float = 0.0
    rest_s: float = 0.0
    measured_with: str = ""

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.name.endswith("_per_s")):
            if not getattr(self, name) > 0:
                raise ConfigError(f"hardware {self.name!r}: {name} is {getattr(self, name)}; expected a positive rate")
        for name in ("expert_s", "exchange_s", "copy_s", "balance_s", "rest_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"hardware {self.name!r}: {name} is {getattr(self, name)}; expected 0 or more seconds"
                )
        if self.tile_rows < 1 or not 0 <= self.copy_exposed <= 1:
            raise ConfigError(
                f"hardware {self.name!r}: tile_rows is {self.tile_rows} and copy_exposed {self.copy_exposed}; expected "
                "1 or more rows, and a share from 0 to 1"
            )

    def copy_tokens(self, expert: ExpertSize) -> int:
        """One replica's exposed time in rows of an expert: the balancer's `copy_tokens`, at most its largest."""
        seconds = self.copy_exposed * (self.copy_s + expert.copy_bytes / self.copy_bytes_per_s)
        if seconds == 0:  # also where rows cost nothing
            return 0
        return round(min(seconds * self.flops_per_s / expert.flop_per_row, MAX_COPY_TOKENS))

    def to_json(self) -> str:
        """The calibration file's text; infinite rates are left out."""
        values = {key: value for key, value in asdict(self).items() if value != float("inf")}
        return json.dumps({"kind": KIND, "version": VERSION, **values}, indent=1) + "\n"


H200 = Hardware(
    name="h200",
    source="assumed: expert products at 650 TFLOP/s as in benchmarks/results/kernels-h200.json, NVLink at 400 GB/s and "
    "a network at 45 GB/s per GPU, balancing without a host synchronization (plan kernel and reroute of "
    "benchmarks/results/plan-h200.json); not fitted to training steps",
    flops_per_s=650e12,
    expert_s=3e-6,
    tile_rows=128,
    source_bytes_per_s=1.0e12,
    exchange_s=80e-6,
    link_bytes_per_s=400e9,
    far_bytes_per_s=45e9,
    copy_s=20e-6,
    copy_bytes_per_s=400e9,
    copy_exposed=0.5,
    balance_s=80e-6,
)
H100 = replace(H200, name="h100", source=H200.source.replace("650", "600", 1), flops_per_s=600e12)
PRESETS = {hardware.name: hardware for hardware in (H200, H100)}


def load_hardware(name: str) -> Hardware:
    """A preset by name, or a calibration file.

    Raises:
        ConfigError: neither, or a file that is not a calibration.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"no hardware {name!r}: choose {', '.join(PRESETS)}, or a file that `equipoise bench calibrate` wrote"
        )
    try:
        content: Any = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ConfigError(f"hardware {name!r} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("kind") != KIND or content.get("version") != VERSION:
        raise ConfigError(
            f"hardware {name!r} is not a calibration of version {VERSION}: write one with `equipoise bench calibrate`"
        )
    names = {f.name for f in fields(Hardware)}
    unknown = sorted(content.keys() - names - {"kind", "version"})
    if unknown:
        raise ConfigError(f"hardware {name!r} has unknown entries: {', '.join(unknown)}; known are {sorted(names)}")
    try:
        return Hardware(**{key: value for key, value in content.items() if key in names})
    except TypeError as error:
        raise ConfigError(f"hardware {name!r} lacks entries or has some of a wrong type: {error}") from error
