"""Weight updates between two processes on one or two GPUs, and train/generate cycles in one, at the shape of a
Qwen3-30B-A3B with as many layers as asked for.

--part colocated (one GPU): a trainer and an engine share the device; buckets go through memory that both see. The
share is of the speed at which the device copies bytes once, each read and written. A bucket is read and written twice,
by the trainer and by the engine, so the share cannot pass 0.5.
--part distributed (two GPUs): a trainer and an engine with a device each; buckets are broadcast. The share is of the
speed of the same group's broadcasts of buckets of that size, nothing else running.
--part cycle (one GPU): TrainAndGenerate, phase by phase.
--part in_process (one GPU): its update alone, from the trainer's BF16 parameters to the engine's in the same process.

Each part puts its rows and its keys of the summary into benchmarks/results/weight-update.json, beside the others' where
--replace is given, else into a new file (--trainer-dtype float32 has keys of its own). Every part ends within
--seconds, with fewer repetitions if need be.
The engine is the real one; its HTTP server here is the standard library's, since machines with GPUs may lack others.

Run: python benchmarks/weight_update_gpu.py --part colocated
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from equipoise.accelerator import get_accelerator
from equipoise.bench.results import parse_options, results_file, update_results
from equipoise.distributed.weight_update import ColocatedUpdate, DistributedUpdate, Phases, UpdateReport
from equipoise.kernels.checksum import copy_with_checksum, new_totals
from equipoise.models.config import ModelConfig
from equipoise.serve.clients.reference import ReferenceClient
from equipoise.serve.engine import EngineConfig
from equipoise.serve.model import build_engine_model
from equipoise.serve.regions import weight_source

TOKEN = "benchmark"
MIB = 2**20
STARTED = time.monotonic()
ENGINE = EngineConfig(max_running_requests=8, context_length=512)
SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
SMALL = {"vocab_size": 512, "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


def config_of(layers: int) -> ModelConfig:
    """The whole shape on a GPU, a toy elsewhere."""
    on_gpu = get_accelerator().device_type != "cpu"
    return ModelConfig(**(SHAPE if on_gpu else SHAPE | SMALL), num_hidden_layers=layers)


# The engine's process


def run_engine(layers: int, dtype: str) -> None:
    """Serves on a free port, which it prints; ends when its standard input does."""
    from equipoise.serve.api import Api
    from equipoise.serve.loop import EngineLoop
    from equipoise.serve.ranks import Ranks
    from equipoise.serve.worker import Worker

    accelerator = get_accelerator()
    accelerator.set_device(0)
    worker = Worker(config_of(layers), ENGINE, accelerator, getattr(torch, dtype), deadline_s=60)
    loop = EngineLoop(Ranks(worker.execute), worker, "none", 60)
    api = Api(loop, TOKEN)
    routes, events = api.routes, asyncio.new_event_loop()
    threading.Thread(target=events.run_forever, daemon=True).start()

    def baseline(body: dict[str, Any]) -> dict[str, Any]:
        """Receives broadcasts through a group that was joined, as the trainer sends them."""
        accelerator.set_device(0)
        data = torch.empty(body["num_bytes"], dtype=torch.uint8, device=worker.device)
        for _ in range(body["times"]):
            worker.groups[body["group"]].broadcast(data).wait()
        accelerator.synchronize()
        return {}

    def memory(body: dict[str, Any]) -> dict[str, Any]:
        """Peak of tensors since the last call, above what is allocated now."""
        stats = accelerator.memory()
        accelerator.reset_peak_memory()
        return {"above": stats.peak_allocated - stats.allocated}

    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True
        wbufsize = 1 << 16

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            own = {"/baseline": baseline, "/peak": memory}.get(self.path)
            if own is not None:
                status, value = 200, own(json.loads(body or b"{}"))
            else:
                spec = routes[(self.command, self.path)]
                answer = api.answer(spec, self.headers.get("authorization", ""), body)
                status, value, _ = asyncio.run_coroutine_threadsafe(answer, events).result()
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    loop.start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()
    loop.close()


@contextlib.contextmanager
def engine_process(layers: int, dtype: str, device: int):
    """Starts an engine on the device with this number among the visible ones; gives a function that waits for it and
    returns its client."""
    variables = dict(os.environ)
    if get_accelerator().device_type != "cpu":
        visible = [name for name in variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        variables["CUDA_VISIBLE_DEVICES"] = visible[device] if visible else str(device)
    command = [sys.executable, __file__, "--role", "engine", "--layers", str(layers), "--dtype", dtype]
    process = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def client() -> ReferenceClient:
        assert process.stdout is not None
        return ReferenceClient(f"http://127.0.0.1:{int(process.stdout.readline())}", TOKEN, timeout_s=60)

    try:
        yield client
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()


# Measurements


def make_trainer(layers: int, dtype: torch.dtype):
    """A model with random weights on this process's device."""
    accelerator = get_accelerator()
    accelerator.set_device(0)
    model = build_engine_model(config_of(layers), accelerator.device(), dtype)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    accelerator.synchronize()
    return model


def seconds_of(run, times: int) -> float:
    """Median of the device's time, after one turn that does not count."""
    accelerator = get_accelerator()
    found = []
    for _ in range(times + 1):
        start, end = (accelerator.event(timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        accelerator.synchronize()
        found.append(start.elapsed_ms(end) / 1e3)
    return statistics.median(found[1:])


def copy_speed(num_bytes: int) -> float:
    """GB/s at which the device copies so many bytes once."""
    device = get_accelerator().device()
    source, target = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return num_bytes / seconds_of(lambda: target.copy_(source), 10) / 1e9


def pass_speed(num_bytes: int, dtype: torch.dtype) -> float:
    """GB/s of bytes of BF16 written by the pass that packs a bucket and the one that loads it: copy and checksum."""
    device = get_accelerator().device()
    source = torch.zeros(num_bytes // 2, dtype=dtype, device=device)
    target, total = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device), new_totals(1, device)[0]
    return num_bytes / seconds_of(lambda: copy_with_checksum(source, target, 0, total), 10) / 1e9


def seconds_left(limit_s: float) -> float:
    return STARTED + limit_s - time.monotonic()


def measure(update, client: ReferenceClient, bucket_bytes: int, times: int, limit_s: float) -> dict[str, Any]:
    """Medians over updates after the first, and the first, which plans and allocates."""
    accelerator = get_accelerator()
    first = update.update("first")
    client._http.post("/peak")
    accelerator.reset_peak_memory()
    before = accelerator.memory().allocated - update.extra_bytes
    reports: list[UpdateReport] = []
    for number in range(times):
        if not reports or seconds_left(limit_s) > 0:
            reports.append(update.update(str(number)))
    above = accelerator.memory().peak_allocated - before if accelerator.device_type != "cpu" else update.extra_bytes
    engine_above = client._http.post("/peak")["above"]
    middle = sorted(reports, key=lambda r: r.seconds)[len(reports) // 2]
    return {
        "bucket_mib": bucket_bytes / MIB,
        "gigabytes": middle.num_bytes / 1e9,
        "buckets": middle.num_buckets,
        "seconds_first": first.seconds,
        "seconds": middle.seconds,
        "gb_per_s": middle.gigabytes_per_s,
        "updates": len(reports),
        "phases_s": middle.phases,
        "engine_phases_s": middle.engine_phases,
        "trainer_extra_buckets": above / max(b.num_bytes for b in update.packer.buckets),
        "engine_extra_buckets": engine_above / max(b.num_bytes for b in update.packer.buckets),
    }


def colocated(
    layers: int, buckets: list[int], slots: list[int], times: int, dtype: torch.dtype, limit_s: float
) -> tuple[list[dict], dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    accelerator = get_accelerator()
    key = "colocated" if dtype == torch.bfloat16 else f"colocated_{name_of(dtype)}"
    size = 4096 * MIB if accelerator.device_type != "cpu" else 64 * MIB
    with engine_process(layers, "bfloat16", 0) as started:
        accelerator.set_device(0)
        speeds = {"copy_gb_per_s": copy_speed(size)}
        speeds |= {
            "pack_pass_gb_per_s": pass_speed(size, dtype),
            "load_pass_gb_per_s": pass_speed(size, torch.bfloat16),
        }
        accelerator.empty_cache()
        print(json.dumps(speeds), flush=True)
        model = make_trainer(layers, dtype)
        client = started()
        print(f"both sides are there after {time.monotonic() - STARTED:.1f} s", flush=True)
        for bucket_bytes, num_slots in itertools.product(buckets, slots):
            if rows and seconds_left(limit_s) < 0:
                print(f"no time for buckets of {bucket_bytes / MIB:g} MiB", flush=True)
                break
            before = accelerator.memory().allocated
            options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "deadline_s": 60, "num_slots": num_slots}
            with ColocatedUpdate(weight_source(model), [client], accelerator, **options) as update:
                row = measure(update, client, bucket_bytes, times, limit_s)
                row["slots"] = update.num_slots
            row["left_mib"] = (accelerator.memory().allocated - before) / MIB
            row |= {"part": key, "layers": layers, "trainer_dtype": name_of(dtype)} | speeds
            row["share_of_copy"] = row["gb_per_s"] / row["copy_gb_per_s"]
            rows.append(row)
            print(json.dumps(row), flush=True)
        check_equal(model, client)
    best = max(rows, key=lambda row: row["gb_per_s"])
    summary = {
        f"{key}_share_of_copy": best["share_of_copy"],
        f"{key}_seconds": best["seconds"],
        f"{key}_gigabytes": best["gigabytes"],
    }
    if dtype == torch.bfloat16:
        summary["extra_memory_buckets"] = max(max(r["trainer_extra_buckets"], r["engine_extra_buckets"]) for r in rows)
    return rows, summary


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_equal(model, client: ReferenceClient) -> None:
    """A few tensors have the same checksums on both sides."""
    from equipoise.checkpoint.tensors import checksums

    got = client.checksums()
    for name in ("model.norm.weight", "lm_head.weight"):
        (wanted,) = checksums([model.get_parameter(name).detach().bfloat16()]).tolist()
        assert got[name] == wanted, name
    expert = model.model.layers[0].mlp.experts.down_proj[3].detach().bfloat16()
    assert got["model.layers.0.mlp.experts.3.down_proj.weight"] == checksums([expert]).tolist()[0]


def distributed(layers: int, buckets: list[int], times: int, limit_s: float) -> tuple[list[dict], dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    accelerator = get_accelerator()
    with engine_process(layers, "bfloat16", 1) as started:
        model = make_trainer(layers, torch.bfloat16)
        client = started()
        for bucket_bytes in buckets:
            if rows and seconds_left(limit_s) < 0:
                break
            options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "deadline_s": 60}
            with DistributedUpdate(weight_source(model), [client], accelerator, **options) as update:
                row = measure(update, client, bucket_bytes, times, limit_s)
                row |= {
                    "part": "distributed",
                    "layers": layers,
                    "broadcast_gb_per_s": broadcast_speed(update, client, 20),
                }
                update.disconnect()
            row["share_of_broadcast"] = row["gb_per_s"] / row["broadcast_gb_per_s"]
            rows.append(row)
            print(json.dumps(row), flush=True)
        check_equal(model, client)
    best = max(rows, key=lambda row: row["share_of_broadcast"])
    summary = {
        "distributed_share_of_broadcast": best["share_of_broadcast"],
        "distributed_seconds": best["seconds"],
        "distributed_gigabytes": best["gigabytes"],
        "extra_memory_buckets_distributed": max(
            max(r["trainer_extra_buckets"], r["engine_extra_buckets"]) for r in rows
        ),
    }
    return rows, summary


def broadcast_speed(update: DistributedUpdate, client: ReferenceClient, times: int) -> float:
    """GB/s of the group's own broadcasts of the largest bucket's size, one after another."""
    num_bytes = max(bucket.num_bytes for bucket in update.packer.buckets)
    data = torch.empty(num_bytes, dtype=torch.uint8, device=update.device)
    body = {"group": update._group_name(0), "num_bytes": num_bytes, "times": times}
    receiving = threading.Thread(target=client._http.post, args=("/baseline", body))
    receiving.start()
    assert update.group is not None
    for _ in range(times // 4):
        update.group.broadcast(data).wait()
    get_accelerator().synchronize()
    phases = Phases(get_accelerator())
    started = time.perf_counter()
    with phases.device("broadcasts"):
        for _ in range(times - times // 4):
            update.group.broadcast(data).wait()
    seconds = phases.finish()["broadcasts"]
    if get_accelerator().device_type == "cpu":
        seconds = time.perf_counter() - started
    receiving.join()
    return num_bytes * (times - times // 4) / seconds / 1e9


def cycle(layers: int, cycles: int, limit_s: float) -> tuple[list[dict], dict[str, Any]]:
    from equipoise.distributed.mesh import ParallelConfig, build_meshes, derive_axes
    from equipoise.distributed.world import join_world
    from equipoise.serve.cycle import TrainAndGenerate
    from equipoise.serve.request import Prompt
    from equipoise.train.optimizer import OptimizerConfig, build_optimizer

    accelerator, config = get_accelerator(), config_of(layers)
    accelerator.set_device(0)
    rows: list[dict[str, Any]] = []
    with join_world(accelerator, timeout_s=120) as world:
        meshes = build_meshes(derive_axes(ParallelConfig(), 1, config.num_experts), world)
        model = build_engine_model(config, world.device, torch.float32).requires_grad_(True)
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.02)
        optimizer = build_optimizer(model, OptimizerConfig(lr=1e-5))
        options: dict[str, Any] = {"holders": [meshes], "bucket_bytes": 1024 * MIB}
        turns = TrainAndGenerate(world, model, optimizer, config, ENGINE, torch.bfloat16, **options)
        ids = torch.randint(0, config.vocab_size, (1, 129), device=world.device)
        for number in range(cycles):
            if number > 2 and seconds_left(limit_s) < 0:
                print(f"time for {number} cycles only", flush=True)
                break
            loss = model(ids[:, :-1], ids[:, 1:].contiguous()).loss_sum / 128
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            accelerator.synchronize()
            if number == 0:
                print(f"first training step done after {time.monotonic() - STARTED:.1f} s", flush=True)
            turns.records.clear()
            start = memory_in_use()
            wish: dict[str, Any] = {"max_new_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
            wish["min_new_tokens"] = 0
            wish |= {"stop_ids": [], "seed": 1, "logprobs": False, "logprob_start": 0, "routes": False}
            with turns.generating(str(number)):
                turns.generate([Prompt(rid="a", ids=ids[0, :16].tolist(), routes_start=0, **wish)])
            before = start
            for record in turns.records:
                row = {"part": "cycle", "cycle": number, "phase": record.name, "seconds": record.seconds}
                row |= {"in_use_gb": record.in_use / 1e9, "freed_gb": (before - record.in_use) / 1e9}
                before = record.in_use
                rows.append(row)
            now: dict[str, Any] = {
                record.name: [round(record.seconds, 4), round(record.in_use / 1e9, 3)] for record in turns.records
            }
            now |= {"in_use_gb": start / 1e9, "loss": loss.item(), "at_s": round(time.monotonic() - STARTED, 1)}
            print(json.dumps({"cycle": number} | now), flush=True)
    last = rows[-1]["cycle"]
    later = [row for row in rows if row["cycle"] >= min(2, last)]
    summary: dict[str, Any] = {"cycles": last + 1, "cycle_layers": layers}
    for name in dict.fromkeys(row["phase"] for row in rows):
        some = [row for row in later if row["phase"] == name]
        key = name.replace(" ", "_")
        summary[f"cycle_{key}_seconds"] = statistics.median(row["seconds"] for row in some)
        summary[f"cycle_{key}_freed_gb"] = statistics.median(row["freed_gb"] for row in some)
    ends = [row["in_use_gb"] for row in rows if row["phase"] == "reload optimizer"]
    summary["cycle_growth_gb"] = ends[-1] - ends[min(1, last)]
    return rows, summary


def in_process(layers: int, times: int, limit_s: float) -> tuple[list[dict], dict[str, Any]]:
    """What a change of phase in one process moves: BF16 parameters to the engine's, straight."""
    from equipoise.distributed.world import join_world
    from equipoise.serve.cycle import TrainAndGenerate

    accelerator = get_accelerator()
    copy = copy_speed(4096 * MIB if accelerator.device_type != "cpu" else 64 * MIB)
    model = make_trainer(layers, torch.bfloat16)
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    with join_world(accelerator, timeout_s=120) as world:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        turns = TrainAndGenerate(world, model, optimizer, config_of(layers), ENGINE, torch.bfloat16)
        seconds, extra = [], 0
        for number in range(times + 1):
            if number > 2 and seconds_left(limit_s) < 0:
                break
            accelerator.reset_peak_memory()
            with turns.generating(str(number)):
                own = turns.worker.do_memory()
                memory = accelerator.memory()
                extra = memory.peak_allocated - memory.allocated
                tensors = dict(turns.worker.model.named_parameters())
                assert all(torch.equal(tensors[name], p) for name, p in list(model.named_parameters())[:9])
            seconds.append({r.name: r.seconds for r in turns.records}["update weights"])
            turns.records.clear()
    middle = statistics.median(seconds[1:])
    row = {"part": "in_process", "layers": layers, "gigabytes": num_bytes / 1e9, "seconds_first": seconds[0]}
    row |= {"seconds": middle, "gb_per_s": num_bytes / middle / 1e9, "copy_gb_per_s": copy, "extra_bytes": extra}
    row |= {"share_of_copy": row["gb_per_s"] / copy, "engine_gb": own["weights"] / 1e9}
    print(json.dumps(row), flush=True)
    return [row], {"in_process_share_of_copy": row["share_of_copy"], "in_process_seconds": middle}


def memory_in_use() -> int:
    accelerator = get_accelerator()
    memory = accelerator.memory()
    return memory.allocated if accelerator.device_type == "cpu" else memory.total - memory.free


def save(rows: list[dict], summary: dict[str, Any], path: Path) -> None:
    """Beside the rows and keys of the other parts."""
    command = shlex.join(["python", "benchmarks/weight_update_gpu.py", *sys.argv[1:]])
    device = get_accelerator().device_name()
    rows = [row | {"command": command, "device": device} for row in rows]
    print("written to", update_results(path, sorted({row["part"] for row in rows}), rows, summary, ["torch"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=["colocated", "distributed", "cycle", "in_process"], default="colocated")
    parser.add_argument("--role", choices=["trainer", "engine"], default="trainer")
    parser.add_argument("--layers", type=int, help="default: 24; 4 for cycles")
    parser.add_argument("--dtype", default="bfloat16", help="of the engine")
    parser.add_argument("--trainer-dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--buckets-mib", type=float, nargs="+", default=[1024, 2048])
    parser.add_argument("--slots", type=int, nargs="+", default=[2], help="buckets at a time on a shared device")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60, help="of one part, starting it included")
    asked = parse_options(parser)
    layers = asked.layers or (4 if asked.part == "cycle" else 24)
    if asked.role == "engine":
        run_engine(layers, asked.dtype)
        return
    buckets = [int(size * MIB) for size in asked.buckets_mib]
    if asked.part == "cycle":
        rows, summary = cycle(layers, asked.times, asked.seconds)
    elif asked.part == "in_process":
        rows, summary = in_process(layers, asked.times, asked.seconds)
    elif asked.part == "colocated":
        dtype = getattr(torch, asked.trainer_dtype)
        rows, summary = colocated(layers, buckets, asked.slots, asked.times, dtype, asked.seconds)
    else:
        rows, summary = distributed(layers, buckets, asked.times, asked.seconds)
    save(rows, summary, results_file(asked, "weight-update.json"))
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
