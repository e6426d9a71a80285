"""Tile sizes of the grouped kernels: a table per device and shape, measured beforehand; nothing is tuned in training.

`equipoise bench kernels --tune` extends the table (`blocks.json`). A shape that it does not list takes the nearest one
that it does; a device that it does not list takes those of a device of the same capability, or defaults.

Shapes: N x K one expert's weight. `tokens`: mean rows of an expert.
"""

import json
import math
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

TABLE = Path(__file__).with_name("blocks.json")
KERNELS = ("forward", "dgrad", "wgrad")

BLOCK_ROWS = 128
"""Rows of a tile (`Tiles.block_rows`), the same for all products of a layer so that they share their tables. With fewer
rows an expert is bound by reading its weights, where half-empty tiles cost nothing."""


@dataclass(frozen=True)
class Block:
    """One kernel's tile and schedule.

    columns, depth: of a tile of the output, and of one step along the contracted dimension.
    rows: of a tile of a weight gradient (elsewhere the rows are those of the tile table).
    group: blocks of rows that are walked together, so that operands stay in the cache.
    flatten: one pipeline over all of a program's tiles, not one per tile (weight gradients always have one).
    split: how often the output is halved; smaller parts leave one after the other and take less shared memory.
    snake: programs take turns in alternating order (weight gradients, whose tiles differ in cost).
    programs: per multiprocessor; two small ones hide each other's beginnings and ends.
    grouped_mm: masters' gradients by `torch.nn.functional.grouped_mm`, and only the replicas' by the kernel.
    """

    columns: int = 128
    depth: int = 64
    rows: int = 128
    group: int = 8
    stages: int = 3
    warps: int = 8
    flatten: bool = False
    split: int = 0
    snake: bool = False
    programs: int = 1
    grouped_mm: bool = False


INTERPRETED = Block(columns=16, depth=16, rows=16, stages=1, warps=1)
POINTERS = Block(columns=128, depth=32, rows=128)
"""Without descriptors, or with elements of 4 bytes."""


def block_rows(device: torch.device) -> int:
    """Rows of a tile on this device."""
    return 16 if device.type == "cpu" else BLOCK_ROWS


@lru_cache
def read_table(path: Path = TABLE) -> dict[str, Any]:
    """{device name: {"capability": [major, minor], kernel: [{"N", "K", "tokens", fields of Block}]}}."""
    return json.loads(path.read_text()) if path.exists() else {}


def write_table(table: dict[str, Any], path: Path = TABLE) -> None:
    """One line per entry, so that changes can be read."""
    lines = []
    for name, device in table.items():
        parts = [f'  "capability": {json.dumps(device["capability"])}']
        for kernel in KERNELS:
            entries = ",\n".join(f"   {json.dumps(entry)}" for entry in device.get(kernel, []))
            parts.append(f'  "{kernel}": [\n{entries}\n  ]')
        lines.append(f' "{name}": {{\n' + ",\n".join(parts) + "\n }")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    read_table.cache_clear()
    _choose.cache_clear()


def table_entry(N: int, K: int, tokens: int, block: Block) -> dict[str, Any]:
    """What the table holds for one shape: the fields that are not at their defaults."""
    default = Block()
    changed = {key: value for key, value in asdict(block).items() if value != getattr(default, key)}
    return {"N": N, "K": K, "tokens": tokens, **changed}


def _entry_block(entry: dict[str, Any]) -> Block:
    names = {field.name for field in fields(Block)}
    return Block(**{key: value for key, value in entry.items() if key in names})


def _distance(entry: dict[str, Any], N: int, K: int, tokens: int) -> float:
    """Shapes count more than tokens: a tile must fit the shape, and tokens vary from step to step."""
    shape = abs(math.log2(entry["N"] / N)) + abs(math.log2(entry["K"] / K))
    return 2 * shape + abs(math.log2(entry["tokens"] / tokens))


@lru_cache(maxsize=4096)
def _choose(device: torch.device, kernel: str, N: int, K: int, tokens: int, wide: bool) -> Block:
    if device.type == "cpu":
        return INTERPRETED
    if wide:
        return POINTERS
    properties = torch.get_device_module(device).get_device_properties(device)
    table = read_table()
    capability = [getattr(properties, "major", 0), getattr(properties, "minor", 0)]
    alike = [entry for entry in table.values() if entry["capability"] == capability]
    found = table.get(properties.name) or (alike[0] if alike else {})
    entries = found.get(kernel, [])
    if not entries:
        return POINTERS
    return _entry_block(min(entries, key=lambda entry: _distance(entry, N, K, tokens)))


def choose_block(
    device: torch.device, kernel: str, N: int, K: int, num_rows: int, num_experts: int, descriptors: bool, size: int
) -> Block:
    """The block of one launch; `size` is the bytes of an element."""
    tokens = max(num_rows // max(num_experts, 1), 1)
    bucket = 1 << (tokens.bit_length() - 1)  # few distinct keys, whatever the counts
    return _choose(device, kernel, N, K, bucket, size > 2 or not descriptors)
