"""What running shared experts beside dispatch and combine hides, on two GPUs or more: a MoE layer's forward and
backward with and without it, and the times of the shared experts and of the four exchanges alone.

hidden: how much shorter the layer is beside than in order, over what could be hidden at most, the shorter of the two
alone. Every figure is the time of the slowest rank. The symmetric dispatcher is measured with several numbers of
programs, since what fills the device leaves no room for others.

Run: torchrun --nproc-per-node 2 benchmarks/overlap_gpu.py [--out FILE]   (writes
benchmarks/results/overlap-h200x2.json)
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transport_gpu import HIDDEN, INNER, NUM_EXPERTS, TOP_K, Bench

from equipoise.accelerator import accelerator_for
from equipoise.bench.results import device_word, parse_options, results_file, write_results
from equipoise.dispatch import SymmetricDispatcher, build_dispatcher
from equipoise.dispatch.base import Dispatcher
from equipoise.models.config import ModelConfig
from equipoise.models.layer import build_moe_layer
from equipoise.moe.beside import SideStream
from equipoise.moe.experts import Experts
from equipoise.moe.synthetic import Workload

REPEATS = 5


class Layer:
    """A MoE layer with shared experts, on one rank, with its experts there."""

    def __init__(self, bench: Bench, tokens: int, shared: int) -> None:
        config = ModelConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=INNER,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=TOP_K,
            n_shared_experts=shared,
        )
        self.bench, self.mlp = bench, build_moe_layer(config, "auto")
        self.mlp.experts = Experts(bench.masters, HIDDEN, INNER)
        self.mlp.to(bench.device, torch.bfloat16)
        for parameter in self.mlp.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        even = Workload("balanced", 1.0, NUM_EXPERTS, TOP_K, bench.size)
        self.mlp.gate.synthetic = even.routing(0, bench.rank)
        self.x_BSD = torch.randn(1, tokens, HIDDEN, device=bench.device).bfloat16().requires_grad_()
        self.gradient = torch.randn_like(self.x_BSD)
        assert self.mlp.shared_experts is not None
        self.shared = self.mlp.shared_experts
        self.in_order = self.shared.forward

    def use(self, dispatcher: Dispatcher, side: SideStream) -> None:
        self.mlp.dispatcher = dispatcher
        self.shared.forward = self.in_order  # type: ignore[method-assign]
        self.mlp.overlap_shared_experts(side)

    def whole(self) -> None:
        y_BSD, _ = self.mlp(self.x_BSD)
        y_BSD.backward(self.gradient)
        self._clear()

    def shared_alone(self) -> None:
        self.in_order(self.x_BSD).backward(self.gradient)
        self._clear()

    def exchanges_alone(self) -> None:
        """Dispatch and combine with experts that do nothing, after a routing that is made once."""
        x_TD = self.x_BSD.flatten(0, 1)
        routing = self.routing()
        arrived = self.mlp.dispatcher.dispatch(x_TD, routing.ids_TK, routing.weights_TK)
        y_TD = self.mlp.dispatcher.combine(arrived.rows_RD, arrived.handle)
        y_TD.backward(self.gradient.flatten(0, 1))
        self._clear()

    def routing(self) -> Any:
        if not hasattr(self, "_routing"):
            with torch.no_grad():
                self._routing = self.mlp.gate(self.x_BSD.flatten(0, 1), None, None)
            self._routing.weights_TK.requires_grad_()
        return self._routing

    def _clear(self) -> None:
        self.x_BSD.grad = None
        for parameter in self.mlp.parameters():
            parameter.grad = None

    def results(self) -> list[torch.Tensor]:
        y_BSD, _ = self.mlp(self.x_BSD)
        y_BSD.backward(self.gradient)
        found = [y_BSD.detach(), self.x_BSD.grad, *(p.grad for p in self.mlp.parameters())]
        self._clear()
        return [tensor for tensor in found if tensor is not None]


def measure(bench: Bench, tokens: int, shared: int, dispatchers: dict[str, Callable[[], Dispatcher]]) -> None:
    layer = Layer(bench, tokens, shared)
    in_order, side = SideStream(), SideStream(accelerator_for(bench.device))
    for name, make in dispatchers.items():
        dispatcher = make()
        layer.use(dispatcher, in_order)
        shared_us, exchanges_us = bench.us(layer.shared_alone, REPEATS), bench.us(layer.exchanges_alone, REPEATS)
        plain, plain_us = layer.results(), []
        beside_us = []
        layer.use(dispatcher, side)
        equal = all(torch.equal(a, b) for a, b in zip(plain, layer.results(), strict=True))
        del plain
        for _ in range(2):  # in turn, so that a drift shows
            layer.use(dispatcher, in_order)
            plain_us.append(bench.us(layer.whole, REPEATS))
            layer.use(dispatcher, side)
            beside_us.append(bench.us(layer.whole, REPEATS))
        saved = sum(plain_us) - sum(beside_us)
        bench.add(
            "MoE layer",
            dispatcher=name,
            tokens=tokens,
            shared_experts=shared,
            in_order_us=plain_us,
            beside_us=beside_us,
            shared_alone_us=shared_us,
            exchanges_alone_us=exchanges_us,
            hidden=saved / 2 / min(shared_us, exchanges_us),
            speedup=sum(plain_us) / sum(beside_us),
            equal=equal,
        )
    bench.space.check()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, nargs="*", default=[0, 32, 64, 128])
    parser.add_argument("--warps", type=int, default=16, help="of the exchanges with fewer programs")
    parser.add_argument("--tokens", type=int, nargs="*", default=[4096, 16384])
    parser.add_argument("--shared", type=int, nargs="*", default=[1, 2])
    options = parse_options(parser)
    bench = Bench()

    def symmetric(tokens: int, programs: int) -> Dispatcher:
        made = SymmetricDispatcher(NUM_EXPERTS, bench.space, 1.05, max_tokens=tokens, num_buffers=3)
        if programs:
            made.launch = made.launch._replace(programs=programs, warps=options.warps)
        return made

    for tokens in options.tokens:
        dispatchers: dict[str, Callable[[], Dispatcher]] = {
            "all_to_all": lambda: build_dispatcher("all_to_all", NUM_EXPERTS, dist.group.WORLD)
        }
        for programs in options.programs:
            name = f"symmetric, {programs} programs of {options.warps} warps" if programs else "symmetric"
            dispatchers[name] = lambda tokens=tokens, programs=programs: symmetric(tokens, programs)
        for shared in options.shared:
            measure(bench, tokens, shared, dispatchers)
    if bench.rank == 0:
        of = lambda row: f"{row['dispatcher']}, {row['tokens']} tokens, {row['shared_experts']} shared"  # noqa: E731
        summary = {key: {of(row): row[key] for row in bench.rows} for key in ("hidden", "speedup")}
        name = torch.cuda.get_device_name()
        out = results_file(options, f"overlap-{device_word(name)}x{bench.size}.json")
        hardware = {"device": name, "devices": bench.size}
        print(summary, write_results(out, bench.rows, summary, ("torch", "triton"), hardware), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
