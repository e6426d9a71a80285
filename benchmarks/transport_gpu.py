"""Symmetric transport and dispatcher between GPUs of one host: bandwidth of pushes and pulls, exchange of counts with
the plan, dispatch and combine against permute and NCCL, and a whole MoE layer against the `all_to_all` one.

Every figure is the time of the slowest rank, in steady state, all handshakes included. A push or pull moves what one
call of the runtime moves: two experts of 25 M parameters for each rank, both ways at once. Dispatches have half of
their rows for the other rank; the NCCL side has its splits on the host already. `same_rows` is the NCCL side with the
reorder that puts rows in order of experts, as the symmetric dispatcher delivers them. A combine finds its rows where
the experts of kernel `triton` write them. `combine_speedup` and `layer_speedup` are of the dispatcher's default, with
experts that weigh rows, so that their ranks add up each token's; `exact_sums` are of `weighs_rows=False`, where the
combine weighs and keeps what came for the backward, as the NCCL side does (`us_of_plain_memory` copies rows first).

Run: torchrun --nproc-per-node 2 benchmarks/transport_gpu.py [--out FILE]   (writes
benchmarks/results/transport-h200x2.json)
"""

import argparse
import os
import statistics
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from equipoise.balance import BalanceConfig, Balancer, PlannerSettings
from equipoise.balance.device_planner import ExchangingPlanner
from equipoise.balance.transport.symmetric import DevicePull, DeviceWork, SymmetricBuffers, SymmetricTransport
from equipoise.bench.hot_experts import HotExperts
from equipoise.bench.results import device_word, parse_options, results_file, write_results
from equipoise.dispatch import SymmetricDispatcher, build_dispatcher
from equipoise.dispatch.all_to_all import expert_major_order
from equipoise.dispatch.base import Dispatcher
from equipoise.kernels import peers
from equipoise.kernels.permute import combine, make_permutation, permute, reorder
from equipoise.models.config import ModelConfig
from equipoise.models.layer import DecoderLayer
from equipoise.models.rotary import rotary_tables
from equipoise.moe.balancing import ExpertBalancing, expert_shapes
from equipoise.moe.experts import Experts
from equipoise.moe.synthetic import Workload
from equipoise.symmetric.space import SymmetricSpace

NUM_EXPERTS, HIDDEN, INNER, TOP_K = 32, 4096, 2048, 4
EXPERT = 3 * HIDDEN * INNER
SIZES = {17: (512, 4, 4096), 134: (4096, 4, 4096), 268: (8192, 8, 2048), 537: (16384, 4, 4096)}
"""Tokens, experts per token and features by megabytes of rows."""
IN_GRAPHS = (17, 134)
"""Sizes that are also timed in CUDA graphs: what remains when launches cost the host nothing."""


class Bench:
    """This rank, its space, and how times are taken."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self.device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=self.device, timeout=timedelta(seconds=120))
        self.space = SymmetricSpace(dist.group.WORLD, self.device, timeout_s=20.0)
        self.masters = NUM_EXPERTS // self.size
        self.rows: list[dict[str, Any]] = []

    def us(self, work: Callable[[], Any], repeats: int = 20) -> float:
        """Median microseconds of a call, over five series of calls."""
        for _ in range(3):
            work()
        series = []
        for _ in range(5):
            self._meet()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                work()
            end.record()
            torch.cuda.synchronize()
            series.append(start.elapsed_time(end) / repeats * 1e3)
        slowest = torch.tensor([statistics.median(series)], device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    def graph_us(self, work: Callable[[], Any], inner: int = 20) -> float:
        """The same of `inner` calls in a CUDA graph: without the time of launches on the host."""
        work()
        self._meet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(inner):
                work()
        return self.us(graph.replay, -(-100 // inner)) / inner

    def _meet(self) -> None:
        torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1, device=self.device))
        torch.cuda.synchronize()

    def add(self, what: str, **values: Any) -> dict[str, Any]:
        row = {"what": what} | values
        self.rows.append(row)
        if self.rank == 0:
            print(row, flush=True)
        return row


def transfers(bench: Bench) -> dict[str, Any]:
    """Pushes and pulls by number of programs."""
    slots = 2
    buffers = SymmetricBuffers({"w": (EXPERT,)}, slots, torch.bfloat16, bench.space)
    transport = SymmetricTransport(bench.space, buffers, bench.masters)
    transport.prepare("w", bench.device, True)
    hosted = [(host + 1) % bench.size * bench.masters + slot for host in range(bench.size) for slot in range(slots)]
    slot_expert = torch.tensor(hosted, dtype=torch.int32, device=bench.device)
    masters = torch.randn(slots, EXPERT, device=bench.device).bfloat16()
    gradients = masters.clone()
    push, pull = transport._push["w"][0], transport._pull["w"]
    weights_P, gradients_P = buffers.pointers_P("weights", "w"), buffers.pointers_P("gradients", "w")
    summary: dict[str, Any] = {"push_gbps": {}, "pull_gbps": {}}
    for programs in (8, 12, 16, 24, 32, 48, 64, 132):
        last = bench.masters, programs
        work = partial(peers.push_weights, bench.space.signals, push, slot_expert, [masters], True, weights_P, *last)
        us = bench.us(work)
        gbps = summary["push_gbps"][programs] = 2 * EXPERT * slots / us / 1e3
        bench.add("push", programs=programs, megabytes=2 * EXPERT * slots / 1e6, us=us, gbps=gbps)
        work = partial(
            peers.pull_gradients, bench.space.signals, pull, slot_expert, [gradients], True, gradients_P, *last
        )
        us = bench.us(work)
        gbps = summary["pull_gbps"][programs] = 4 * EXPERT * slots / us / 1e3
        bench.add("pull", programs=programs, megabytes=4 * EXPERT * slots / 1e6, us=us, gbps=gbps)
    return summary


def plans(bench: Bench) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    load_PE = torch.randint(0, 90, (bench.size, NUM_EXPERTS), generator=generator) ** 2
    load_PE[:, : bench.masters] *= 3
    planner = ExchangingPlanner(bench.space, NUM_EXPERTS, PlannerSettings(2, 0.01))
    counts = load_PE[bench.rank].int().contiguous().to(bench.device)
    eager, graph = bench.us(lambda: planner(counts), 50), bench.graph_us(lambda: planner(counts))
    bench.add("count exchange and plan", us=graph, us_with_launch=eager)
    return {"count_plan_us": graph, "count_plan_us_with_launch": eager}


def dispatch(bench: Bench) -> dict[str, Any]:
    """Dispatch and combine by megabytes of rows."""
    keys = ("dispatch_speedup", "dispatch_speedup_same_rows", "combine_speedup")
    keys += ("dispatch_speedup_in_graphs", "combine_speedup_in_graphs")
    keys += ("combine_speedup_exact_sums", "dispatch_speedup_with_weights")
    summary: dict[str, Any] = {key: {} for key in keys}
    for megabytes in SIZES:
        exchange(bench, megabytes, summary)
    return summary


def exchange(bench: Bench, megabytes: int, summary: dict[str, Any]) -> None:
    """Adds the figures of one size to the summary."""
    T, K, D = SIZES[megabytes]
    L = NUM_EXPERTS // bench.size
    generator = torch.Generator(bench.device).manual_seed(bench.rank)
    x_TD = torch.randn(T, D, device=bench.device, generator=generator).bfloat16()
    ids_TK = torch.rand(T, NUM_EXPERTS, device=bench.device, generator=generator).topk(K, 1).indices.int()
    weights_TK = torch.rand(T, K, device=bench.device, generator=generator)
    symmetric = SymmetricDispatcher(NUM_EXPERTS, bench.space, 1.25, max_tokens=T, num_buffers=7)
    symmetric.reserve(T, K, D, 2)
    permutation = make_permutation(ids_TK, NUM_EXPERTS)
    counts = permutation.counts_E
    places = symmetric.places(ids_TK)
    rows_RD, record_C, layout, _ = symmetric.send(x_TD, places)
    written_RD = symmetric.make_rows(x_TD.dtype).copy_(rows_RD)  # as experts write their outputs
    plain_RD = rows_RD.clone()
    send_P = counts.view(bench.size, L).sum(1)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts.contiguous())
    receive_PL = theirs.view(bench.size, L)
    ins, outs = send_P.tolist(), receive_PL.sum(1).tolist()
    arrived, back = (torch.empty(sum(n), D, device=bench.device, dtype=x_TD.dtype) for n in (outs, ins))
    order_R, inverse_R = expert_major_order(receive_PL.long(), sum(outs))

    def nccl() -> torch.Tensor:
        dist.all_to_all_single(arrived, permute(x_TD, permutation, num_rows=sum(ins)), outs, ins)
        return arrived

    def nccl_combine() -> torch.Tensor:
        dist.all_to_all_single(back, arrived, ins, outs)
        return combine(back, weights_TK, permutation)

    def reorder_back(rows: torch.Tensor) -> torch.Tensor:
        dist.all_to_all_single(back, reorder(rows, inverse_R, order_R), ins, outs)
        return back

    def symmetric_combine(rows: torch.Tensor) -> torch.Tensor:
        return symmetric.collect(symmetric._combine, rows, layout, weights_TK.shape, weights_TK, True, record_C)[0]

    ours = bench.us(lambda: symmetric.send(x_TD, places))
    equal = torch.equal(symmetric.send(x_TD, places)[0][: sum(outs)], reorder(nccl(), order_R, inverse_R))
    row = bench.add("dispatch", megabytes=megabytes, us=ours, equal=equal, nccl_us=bench.us(nccl))
    if megabytes in IN_GRAPHS:  # a piece of memory that is lent to a graph stays with it, so one call for each
        graphs = bench.graph_us(lambda: symmetric.send(x_TD, places), 1), bench.graph_us(nccl, 1)
        row["graph_us"], row["nccl_graph_us"] = graphs
        summary["dispatch_speedup_in_graphs"][megabytes] = graphs[1] / graphs[0]
    row["nccl_same_rows_us"] = bench.us(lambda: reorder(nccl(), order_R, inverse_R))
    row["gbps_of_rows"] = T * K * D * 2 / ours / 1e3
    nccl_us = row["nccl_us"]
    summary["dispatch_speedup"][megabytes] = nccl_us / ours
    summary["dispatch_speedup_same_rows"][megabytes] = row["nccl_same_rows_us"] / ours
    combined = bench.us(lambda: symmetric_combine(written_RD))
    theirs_TD = combine(reorder_back(reorder(arrived, order_R, inverse_R)), weights_TK, permutation)
    equal = torch.equal(symmetric_combine(written_RD), theirs_TD)
    row = bench.add("combine", megabytes=megabytes, us=combined, equal=equal, nccl_us=bench.us(nccl_combine))
    row["us_of_plain_memory"] = bench.us(lambda: symmetric_combine(plain_RD))
    if megabytes in IN_GRAPHS:
        graphs = bench.graph_us(lambda: symmetric_combine(written_RD), 1), bench.graph_us(nccl_combine, 1)
        row["graph_us"], row["nccl_graph_us"] = graphs
        summary["combine_speedup_in_graphs"][megabytes] = graphs[1] / graphs[0]
    row["nccl_same_rows_us"] = bench.us(lambda: (reorder(arrived, inverse_R, order_R), nccl_combine()))
    summary["combine_speedup_exact_sums"][megabytes] = row["nccl_us"] / combined
    weighing = SymmetricDispatcher(NUM_EXPERTS, bench.space, 1.25, max_tokens=T, num_buffers=7, weighs_rows=True)
    weighing.reserve(T, K, D, 2)
    rows_RD, kept_C, layout, weights_C = weighing.send(x_TD, places, weights_TK)
    weighed_RD = weighing.make_rows(x_TD.dtype).copy_(rows_RD * weights_C[:, None])

    def weighing_combine() -> torch.Tensor:
        return weighing.collect(weighing._combine, weighed_RD, layout, weights_TK.shape, None, False, kept_C)[0]

    difference = (weighing_combine() - theirs_TD).norm() / theirs_TD.norm()  # each later call adds to rows again
    ours = bench.us(lambda: weighing.send(x_TD, places, weights_TK))
    bench.add("dispatch with weights", megabytes=megabytes, us=ours)
    summary["dispatch_speedup_with_weights"][megabytes] = nccl_us / ours
    ours = bench.us(weighing_combine)
    bench.add("combine of weighed rows", megabytes=megabytes, us=ours, difference=float(difference))
    summary["combine_speedup"][megabytes] = row["nccl_us"] / ours
    bench.space.check()


class Layer:
    """A decoder layer of the preset's size, on one rank, with its experts there."""

    def __init__(self, bench: Bench, tokens: int) -> None:
        config = ModelConfig(
            hidden_size=HIDDEN,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            moe_intermediate_size=INNER,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=TOP_K,
        )
        self.bench, self.layer = bench, DecoderLayer(config, 0, "auto").to(torch.bfloat16)
        self.mlp = self.layer.mlp
        self.mlp.experts = Experts(bench.masters, HIDDEN, INNER).to(torch.bfloat16)
        self.layer.to(bench.device)
        for parameter in self.layer.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        sequences, length = max(tokens // 4096, 1), min(tokens, 4096)
        self.x_BSD = torch.randn(sequences, length, HIDDEN, device=bench.device).bfloat16().requires_grad_()
        positions = torch.arange(length, device=bench.device)[None]
        self.rotary = rotary_tables(positions, 128, config.rope_theta, torch.bfloat16)
        self.gradient = torch.randn_like(self.x_BSD)

    def use(self, dispatcher: Dispatcher, balancer: Balancer | None, workload: Workload | HotExperts) -> None:
        self.mlp.dispatcher = dispatcher
        self.mlp.balancing = None if balancer is None else ExpertBalancing(balancer, 0, self.mlp.experts)
        self.mlp.gate.synthetic = workload.routing(0, self.bench.rank)

    def moe(self) -> None:
        y_BSD, _ = self.mlp(self.x_BSD)
        y_BSD.backward(self.gradient)
        self._clear()

    def whole(self) -> None:
        y_BSD, _ = self.layer(self.x_BSD, self.rotary, None, None)
        y_BSD.backward(self.gradient)
        self._clear()

    def _clear(self) -> None:
        self.x_BSD.grad = None
        for parameter in self.layer.parameters():
            parameter.grad = None


def layers(bench: Bench) -> dict[str, Any]:
    """Forward and backward of an MoE layer with either dispatcher, and what of the pull a decoder layer shows."""
    summary: dict[str, Any] = {"layer_speedup": {}, "layer_speedup_exact_sums": {}}
    make = lambda name, imbalance: Workload(name, imbalance, NUM_EXPERTS, TOP_K, bench.size)  # noqa: E731
    collective = build_dispatcher("all_to_all", NUM_EXPERTS, dist.group.WORLD)
    for tokens in (4096, 16384):
        layer = Layer(bench, tokens)
        symmetric = SymmetricDispatcher(NUM_EXPERTS, bench.space, 0, max_tokens=tokens, num_buffers=3)
        layer.use(collective, None, make("balanced", 1.0))
        theirs = bench.us(layer.moe, 5)
        layer.use(symmetric, None, make("balanced", 1.0))
        ours = bench.us(layer.moe, 5)
        weighing = SymmetricDispatcher(NUM_EXPERTS, bench.space, 0, max_tokens=tokens, num_buffers=3, weighs_rows=True)
        layer.use(weighing, None, make("balanced", 1.0))
        weighed = bench.us(layer.moe, 5)
        bench.add("MoE layer", tokens=tokens, us=weighed, all_to_all_us=theirs, us_exact_sums=ours)
        summary["layer_speedup"][tokens] = theirs / weighed
        summary["layer_speedup_exact_sums"][tokens] = theirs / ours
    shapes = expert_shapes(HIDDEN, INNER)
    config = BalanceConfig(num_redundant_experts_per_rank=2)
    balancer = Balancer(dist.group.WORLD, NUM_EXPERTS, shapes, torch.bfloat16, config, space=bench.space)
    options: dict[str, Any] = {"max_tokens": 16384, "num_buffers": 3, "weighs_rows": True}
    balanced = SymmetricDispatcher(balancer.num_physical_experts, bench.space, 1.5, **options)
    layer.use(balanced, balancer, HotExperts(1.6, NUM_EXPERTS, TOP_K, bench.size))
    with_pull = bench.us(layer.whole, 5)
    transport = balancer.transport
    pull_gradients = transport.pull_gradients
    transport.pull_gradients = lambda name, copies, gradients, what: DevicePull(  # type: ignore[method-assign]
        DeviceWork(None, []), list(gradients)
    )
    without = bench.us(layer.whole, 5)
    transport.pull_gradients = pull_gradients  # type: ignore[method-assign]
    record = balancer.take_records()[-1]
    bench.add("decoder layer", tokens=16384, us=with_pull, us_without_pull=without, copies=record.copies)
    summary["pull_exposed_share"] = (with_pull - without) / with_pull
    bench.space.check()
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse_options(parser)
    bench = Bench()
    summary: dict[str, Any] = {}
    for part in (plans, transfers, dispatch, layers):
        summary |= part(bench)
    if bench.rank == 0:
        name = torch.cuda.get_device_name()
        out = results_file(options, f"transport-{device_word(name)}x{bench.size}.json")
        hardware = {"device": name, "devices": bench.size}
        print(summary, write_results(out, bench.rows, summary, ("torch", "triton"), hardware), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
