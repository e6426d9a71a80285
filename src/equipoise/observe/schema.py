"""The load trace: what its Parquet files hold. docs/traces.md tells the same for readers in other languages.

A trace is a folder of Parquet files of two tables. Every file is complete in itself: the sizes that its lists refer to
are in its metadata, as JSON under the key `equipoise`.

Shapes: L MoE layers, P ranks of an EP group, E logical experts, M = E / P masters and R replica slots per rank, F
phases. Lists are flat, row-major: `load[p * E + e]`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from equipoise.errors import TraceError

try:
    import pyarrow as pa
except ImportError as missing:
    raise TraceError(
        "load traces need the package pyarrow, which is not installed: pip install 'equipoise[train]'"
    ) from missing

SCHEMA_NAME = "equipoise.load_trace"
SCHEMA_VERSION = 1
METADATA_KEY = b"equipoise"
TRACE_FOLDER = "trace"
"""Folder of the trace inside a run folder."""

PHASES = ("router", "balance", "dispatch", "experts", "combine")
"""Parts of a MoE layer's forward in time order. `balance` is the exchange of counts, planning and the start of the
push; it is 0 with balancing off."""

LAYERS, SEQUENCES = "layers", "sequences"
"""Tables, and what their files' names begin with."""

_PLACE = [pa.field(name, pa.int32(), nullable=False) for name in ("step", "microbatch", "layer", "group")]

LAYERS_SCHEMA = pa.schema(
    [
        *_PLACE,
        pa.field("rank_imbalance", pa.float32(), nullable=False),
        pa.field("rank_imbalance_after", pa.float32(), nullable=False),
        pa.field("copies", pa.int32(), nullable=False),
        pa.field("copied_bytes", pa.int64(), nullable=False),
        pa.field("rank_load", pa.list_(pa.int32()), nullable=False),
        pa.field("rank_load_after", pa.list_(pa.int32()), nullable=False),
        pa.field("seconds", pa.list_(pa.float32())),
        pa.field("load", pa.list_(pa.int32())),
        pa.field("slot_expert", pa.list_(pa.int32())),
        pa.field("quota", pa.list_(pa.int32())),
        pa.field("delivered", pa.list_(pa.int32())),
    ]
)
"""One row for each recorded step, microbatch, MoE layer and EP group, in that order.

step: optimizer step from 1, as in metrics.jsonl. microbatch: of the step, from 0. layer: the how many-th MoE layer of
the model, from 0. group: the how many-th EP group, from 0.
rank_imbalance, rank_imbalance_after: largest over mean of `rank_load` and `rank_load_after`; 1 without tokens.
copies: replicas. copied_bytes: their weights, one way.
rank_load [P]: rows (tokens x experts per token) that each rank would compute by the router's choice.
rank_load_after [P]: rows that arrived at each rank, counted by the dispatcher: delivered, not planned.
seconds [P, F]: time of each phase of the forward on each rank (of the device where there is one); null if unknown.
The following are null in rows of steps recorded without matrices:
load [P, E]: rows of each source rank for each logical expert.
slot_expert [P, R]: logical expert in each replica slot, -1 free. Empty with balancing off.
quota [P, M+R]: rows planned for each physical expert. delivered [P, M+R]: rows that arrived for it.
"""

MATRIX_COLUMNS = ("load", "slot_expert", "quota", "delivered")
"""Columns of `layers` that are null in rows without matrices."""

SEQUENCES_SCHEMA = pa.schema(
    [
        *_PLACE,
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("sequence", pa.int32(), nullable=False),
        pa.field("counts", pa.list_(pa.int32()), nullable=False),
    ]
)
"""One row for each sequence of a sampled step, microbatch and MoE layer: the finest grain, from which the load of any
number of ranks can be made.

rank: source rank in the EP group. sequence: of the rank's microbatch, from 0. counts [E]: rows for each logical expert;
padding counts nowhere.
"""

SCHEMAS = {LAYERS: LAYERS_SCHEMA, SEQUENCES: SEQUENCES_SCHEMA}


@dataclass(frozen=True)
class TraceInfo:
    """Sizes and settings that hold for a whole trace. 0 or empty where unknown (imported traces).

    num_slots: replica slots per rank; 0 with balancing off. dtype: of the experts' compute ("float32", "bfloat16").
    planner: empty with balancing off. workload: of `synthetic_routing`, empty where routing was learned.
    device: name of the accelerator or processor. source: what wrote it ("equipoise", "megatron", "vllm", "flame-moe").
    """

    num_layers: int
    num_experts: int
    num_experts_per_tok: int
    ep_size: int
    num_groups: int = 1
    num_slots: int = 0
    num_microbatches: int = 1
    hidden_size: int = 0
    moe_intermediate_size: int = 0
    sequence_length: int = 0
    dtype: str = ""
    planner: str = ""
    workload: str = ""
    device: str = ""
    source: str = "equipoise"

    @property
    def num_masters(self) -> int:
        """M: logical experts at home on each rank."""
        return self.num_experts // self.ep_size

    @property
    def num_physical_local(self) -> int:
        """M + R."""
        return self.num_masters + self.num_slots

    def metadata(self, table: str) -> dict[bytes, bytes]:
        """What a file of `table` says about itself."""
        content = {"schema": SCHEMA_NAME, "version": SCHEMA_VERSION, "table": table, "phases": PHASES, **asdict(self)}
        return {METADATA_KEY: json.dumps(content).encode()}


def read_info(metadata: Mapping[bytes, bytes] | None, where: str) -> tuple[str, TraceInfo]:
    """A file's table and sizes from its Parquet metadata; `where` names it in errors.

    Raises:
        TraceError: a foreign file, another version, or metadata that cannot be.
    """
    raw = (metadata or {}).get(METADATA_KEY)
    try:
        content: Any = None if raw is None else json.loads(raw)
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA_NAME:
        raise TraceError(
            f"{where} is a Parquet file, but not of a load trace: its metadata does not say {SCHEMA_NAME!r}. Traces "
            "are written by runs with a [trace] section, and by the importers (docs/traces.md)"
        )
    version = content.get("version")
    if version != SCHEMA_VERSION:
        raise TraceError(
            f"{where} has version {version} of the trace's schema; this program reads version {SCHEMA_VERSION}. "
            "Read it with the release that wrote it, or upgrade"
        )
    names = [f.name for f in fields(TraceInfo)]
    try:
        info = TraceInfo(**{name: content[name] for name in names if name in content})
        sizes = (info.num_layers, info.num_experts, info.ep_size, info.num_groups)
        if any(not isinstance(size, int) or size < 1 for size in sizes) or info.num_experts % info.ep_size:
            raise ValueError(f"{info.num_layers} layers, {info.num_experts} experts, EP size {info.ep_size}")
    except (TypeError, ValueError) as error:
        raise TraceError(f"{where}: the trace's metadata has impossible or missing sizes ({error})") from error
    table = content.get("table")
    if table not in SCHEMAS:
        raise TraceError(f"{where} holds a table {table!r}; known are {', '.join(SCHEMAS)}")
    return table, info
