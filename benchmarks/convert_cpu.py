"""Conversion of a checkpoint against a plain copy of its files on the same disk: speed, and peak memory.

The checkpoint has the shape of Qwen3-30B-A3B at one layer (128 experts, the whole vocabulary): 2.5 GB of BF16 in files
of at most half a GB, of random numbers. Each conversion runs in a process of its own, whose peak resident memory counts
everything, Python and torch included. Copies and conversions take turns; each writes new files and waits until they are
on storage; the source is in the page cache for all. A ratio is the median over turns of the ratio within a turn.
The last conversion's result is compared with the source, byte by byte.

Run: python benchmarks/convert_cpu.py [--turns N] [--folder DIR]   (writes benchmarks/results/convert-cpu.json)
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from equipoise.bench.results import parse_options, results_file, write_results
from equipoise.checkpoint.hf import HFMapping, export, hf_config, open_source
from equipoise.checkpoint.hf.safetensors_file import SafetensorsReader, SafetensorsWriter, as_bytes
from equipoise.models.config import ModelConfig

MODEL = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rope_theta": 1e6,
}
SHARD_BYTES = 500_000_000
MEMORY_LIMIT = "1.3 x the largest shard + 1 GB"


def make_checkpoint(folder: Path, model: dict, shard_bytes: int) -> None:
    """A Hugging Face folder of random BF16 numbers, in files of at most `shard_bytes` unless a tensor is larger."""
    mapping = HFMapping(ModelConfig(**model))
    noise = torch.randn(8 << 20).to(torch.bfloat16)
    shards: list[dict] = [{}]
    size = 0
    for key, (_, piece) in mapping.sources.items():
        num_bytes = 2 * torch.Size(piece.shape).numel()
        if shards[-1] and size + num_bytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = (torch.bfloat16, piece.shape)
        size += num_bytes
    folder.mkdir()
    weight_map = {}
    for number, header in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(header, name)
        writer = SafetensorsWriter(folder / name, header)
        for key, (_, shape) in header.items():
            row = max(1, torch.Size(shape[1:]).numel())
            step = max(1, noise.numel() // row)
            for first in range(0, shape[0], step):
                count = min(step, shape[0] - first)
                offset = hash((key, first)) % (noise.numel() - count * row + 1)
                writer.write_rows(key, first, noise[offset : offset + count * row].view(count, *shape[1:]).clone())
        writer.close()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(hf_config(mapping) | {"dtype": "bfloat16"}))


def convert(source: Path, target: Path, to: str) -> dict:
    """In this process: seconds of the conversion, without the start of Python, and the peak memory with it."""
    opened = open_source(source)
    start = time.perf_counter()
    export(opened, target, to, shard_bytes=SHARD_BYTES)
    seconds = time.perf_counter() - start
    opened.close()
    return {"seconds": seconds, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def convert_elsewhere(source: Path, target: Path, to: str) -> dict:
    command = [sys.executable, __file__, "--one", str(source), str(target), to]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def copy(source: Path, target: Path) -> float:
    """Seconds to copy the files and have them on storage."""
    start = time.perf_counter()
    target.mkdir()
    for file in sorted(source.iterdir()):
        shutil.copyfile(file, target / file.name)
        with open(target / file.name, "rb") as handle:
            os.fsync(handle.fileno())
    return time.perf_counter() - start


def tensor_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def same_tensors(a: Path, b: Path) -> bool:
    """Whether two folders have the same tensors, byte for byte."""
    found = []
    for folder in (a, b):
        readers = [SafetensorsReader(file) for file in folder.glob("*.safetensors")]
        found.append({key: reader for reader in readers for key in reader.entries})
    if found[0].keys() != found[1].keys():
        return False
    for key, reader in found[0].items():
        entry, other = reader.entries[key], found[1][key].entries[key]
        if entry[:2] != other[:2]:
            return False
        for start in range(0, entry.num_bytes, 64 << 20):
            count = min(64 << 20, entry.num_bytes - start)
            x, y = torch.empty(count, dtype=torch.uint8), torch.empty(count, dtype=torch.uint8)
            reader.read_bytes(entry.offset + start, as_bytes(x))
            found[1][key].read_bytes(other.offset + start, as_bytes(y))
            if not torch.equal(x, y):
                return False
    return True


def measure(folder: Path, turns: int, model: dict) -> tuple[list[dict], dict]:
    source = folder / "hf"
    make_checkpoint(source, model, SHARD_BYTES)
    rows = []
    for turn in range(turns):
        copied = copy(source, folder / "copy")
        native = convert_elsewhere(source, folder / "native", "native")
        back = convert_elsewhere(folder / "native", folder / "back", "hf")
        is_same = same_tensors(source, folder / "back") if turn == turns - 1 else None
        size, largest = tensor_bytes(source), max(f.stat().st_size for f in source.glob("*.safetensors"))
        native_largest = max(f.stat().st_size for f in (folder / "native").glob("*.safetensors"))
        limits = {"to native": 1.3 * largest + 1e9, "to hf": 1.3 * native_largest + 1e9}
        for name, result in (("to native", native), ("to hf", back)):
            rows.append(
                {
                    "turn": turn,
                    "conversion": name,
                    "gb": size / 1e9,
                    "copy_mb_per_s": size / copied / 1e6,
                    "mb_per_s": size / result["seconds"] / 1e6,
                    "speed_of_copy": copied / result["seconds"],
                    "peak_gb": result["peak_bytes"] / 1e9,
                    "peak_limit_gb": limits[name] / 1e9,
                }
            )
        for name in ("copy", "native", "back"):
            shutil.rmtree(folder / name)
        print(json.dumps(rows[-2:]), flush=True)
    summary = {"memory_limit": MEMORY_LIMIT, "there_and_back_is_byte_equal": is_same}
    for name in ("to native", "to hf"):
        mine = [row for row in rows if row["conversion"] == name]
        summary[f"{name}: speed, of a plain copy"] = statistics.median(row["speed_of_copy"] for row in mine)
        summary[f"{name}: peak GB"] = max(row["peak_gb"] for row in mine)
        summary[f"{name}: peak limit GB"] = mine[0]["peak_limit_gb"]
    return rows, summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary folder by default")
    parser.add_argument("--small", action="store_true", help="a toy, to see that everything runs; writes no results")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parse_options(parser)
    if args.one:
        print(json.dumps(convert(Path(args.one[0]), Path(args.one[1]), args.one[2])))
        return
    small = {"vocab_size": 1000, "num_experts": 8, "hidden_size": 256} if args.small else {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows, summary = measure(Path(folder), args.turns, MODEL | small)
    print(json.dumps(summary, indent=1))
    if not args.small:
        path = write_results(results_file(args, "convert-cpu.json"), rows, summary, ["torch", "equipoise"])
        print(f"written to {path}")


if __name__ == "__main__":
    main()
