"""Loads to replay: of a workload that is stated, or of a trace, also at other numbers of ranks.

Shapes: N layers of one microbatch, P ranks of an EP group, E experts, U units (a sequence, or a rank's microbatch).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from equipoise.balance.plan import experts_per_rank
from equipoise.balance.protocol import check_counts
from equipoise.errors import ConfigError, TraceError
from equipoise.moe.synthetic import WORKLOADS, Workload

if TYPE_CHECKING:  # a workload needs no pyarrow
    from equipoise.observe.reader import Trace

LOGNORMAL = "lognormal"
SIGMA = 1.0
"""Of the workload `lognormal`: experts' shares are exp(SIGMA x normal), drawn anew for each layer."""


@dataclass(frozen=True)
class LoadBlock:
    """Layers of one microbatch. load_NPE: integer rows of each source rank for each expert."""

    step: int
    microbatch: int
    layers_N: np.ndarray
    load_NPE: np.ndarray

    @cached_property
    def load_NE(self) -> np.ndarray:
        """int64: rows of each expert."""
        return self.load_NPE.sum(1, dtype=np.int64)

    @cached_property
    def sent_NP(self) -> np.ndarray:
        """int64: rows of each source rank."""
        return self.load_NPE.sum(2, dtype=np.int64)


def workload_name(name: str) -> str:
    """The name of a workload; W0 to W7 are those of `moe.synthetic` in order.

    Raises:
        ConfigError: there is no such workload.
    """
    by_number = {f"W{number}": name for number, name in enumerate(WORKLOADS)}
    name = by_number.get(name.upper(), name)
    if name not in (*WORKLOADS, LOGNORMAL):
        listed = ", ".join(f"{number} {name}" for number, name in by_number.items())
        raise ConfigError(f"there is no workload {name!r}: choose {listed}, or {LOGNORMAL}")
    return name


def exact_loads(workload: Workload, tokens: int, num_layers: int, num_steps: int) -> Iterator[LoadBlock]:
    """One microbatch per step, every layer the same, as `[synthetic_routing]` lays it down.

    tokens: of each rank in a microbatch.
    """
    experts_per_rank(workload.num_experts, workload.num_ranks)
    check_counts(0, tokens * workload.num_ranks * workload.num_experts_per_tok)
    for step in range(num_steps):
        routings = [workload.routing(step, rank) for rank in range(workload.num_ranks)]
        load_PE = np.array([routing.expert_counts(tokens) for routing in routings], np.int32)
        yield LoadBlock(step, 0, np.arange(num_layers), np.repeat(load_PE[None], num_layers, 0))


def drawn_loads(
    name: str,
    imbalance: float,
    num_experts: int,
    num_experts_per_tok: int,
    num_ranks: int,
    tokens: int,
    num_layers: int,
    num_microbatches: int,
    seed: int = 0,
) -> Iterator[LoadBlock]:
    """A workload's shares with the scatter of draws, independent in each layer and microbatch.

    Each source rank's rows for each expert have the mean and, but for correlation, the variance of a multinomial
    draw; they add up to its tokens x experts per token exactly. The ranks are rotated from layer to layer, so that
    not all layers have the same hot rank. `lognormal` has shares of its own in each layer and ignores `imbalance`.
    """
    E, P = num_experts, num_ranks
    experts_per_rank(E, P)
    from equipoise.simulate.scatter import scatter

    workload = Workload(name, imbalance, E, num_experts_per_tok, P) if name != LOGNORMAL else None
    token_shares = np.ones(P)
    if workload is not None:
        token_shares = np.array([workload.routing(0, rank).token_share for rank in range(P)])
    rows_P = np.round(tokens * token_shares) * num_experts_per_tok
    check_counts(0, int(rows_P.sum()))
    if workload is None:
        shares_NE = np.exp(SIGMA * np.random.default_rng(seed).standard_normal((num_layers, E)))
        shares_NE = _capped(shares_NE / shares_NE.sum(1, keepdims=True), 1 / num_experts_per_tok)
    for step in range(num_microbatches):
        rng = np.random.default_rng([seed, step])
        if workload is not None:
            shares_E = np.array(workload.shares(step))
            shares_NE = np.stack([np.roll(shares_E, layer % P * (E // P)) for layer in range(num_layers)])
        load_NPE = scatter(shares_NE, rows_P, rng.standard_normal((num_layers, P, E), np.float32))
        yield LoadBlock(step, 0, np.arange(num_layers), load_NPE)


def _capped(shares_NE: np.ndarray, limit: float) -> np.ndarray:
    """Shares of at most `limit` (an expert gets at most one choice of each token), the excess spread over the rest."""
    for _ in range(50):
        over = shares_NE > limit
        if not over.any():
            break
        excess_N1 = np.where(over, shares_NE - limit, 0).sum(1, keepdims=True)
        rest_NE = np.where(over, 0, shares_NE)
        shares_NE = np.where(over, limit, shares_NE + excess_N1 * rest_NE / rest_NE.sum(1, keepdims=True))
    return shares_NE


def trace_loads(
    trace: "Trace", num_ranks: int, steps: tuple[int, int] | None = None, tokens_per_rank: int | None = None
) -> Iterator[LoadBlock]:
    """A trace's loads for an EP group of `num_ranks`, whose ranks have `tokens_per_rank` tokens in a microbatch.

    Where that is None, as many as in the trace. Then at the trace's own EP size the recorded matrices are replayed.
    Otherwise the recorded sequences of a layer, in the order of the run, are dealt to the ranks, as many to each as it
    has in a microbatch; without recorded sequences, so are whole microbatches of ranks. Where too few were recorded
    they are dealt again from the start.
    A number of tokens is rounded to whole sequences, at least one.

    Raises:
        TraceError: nothing recorded that could be replayed.
        ConfigError: experts that do not divide over the ranks, or a number of tokens without recorded sequences.
    """
    info = trace.info
    experts_per_rank(info.num_experts, num_ranks)
    if num_ranks == info.ep_size and tokens_per_rank is None:
        yield from _recorded(trace, steps)
        return
    units_LUE, per_rank = _units(trace, steps)
    if tokens_per_rank is not None:
        if not info.sequence_length or not _has_sequences(trace):
            raise ConfigError(
                f"--tokens-per-rank is {tokens_per_rank}, and {trace.directory} has no sequences to make up other "
                "microbatches of: record some (trace.sequences_every), or leave it out"
            )
        per_rank = max(1, round(tokens_per_rank / info.sequence_length))
    needed = num_ranks * per_rank
    number = max(1, units_LUE.shape[1] // needed)
    for block in range(number):
        chosen = np.arange(block * needed, (block + 1) * needed) % units_LUE.shape[1]
        part = units_LUE[:, chosen].reshape(info.num_layers, num_ranks, per_rank, info.num_experts)
        yield LoadBlock(block, 0, np.arange(info.num_layers), part.sum(2, dtype=np.int64))


def _recorded(trace: "Trace", steps: tuple[int, int] | None) -> Iterator[LoadBlock]:
    """The matrices as they are, one block for each step, microbatch and EP group."""
    key: tuple[int, int, int] | None = None
    layers: list[int] = []
    loads: list[np.ndarray] = []
    for row in trace.loads(steps):
        this = (row.step, row.microbatch, row.group)
        if key is not None and this != key:
            yield LoadBlock(key[0], key[1], np.array(layers), np.stack(loads))
            layers, loads = [], []
        key = this
        layers.append(row.layer)
        assert row.load_PE is not None
        loads.append(row.load_PE)
    if key is None:
        from equipoise.observe.reader import say_earlier

        raise TraceError(
            f"{trace.directory}: no load matrices were recorded{_range(steps)}; a run records them every "
            "trace.matrices_every steps: train for more steps, or with a smaller number"
            f"{say_earlier(trace.directory)}"
        )
    yield LoadBlock(key[0], key[1], np.array(layers), np.stack(loads))


def _units(trace: "Trace", steps: tuple[int, int] | None) -> tuple[np.ndarray, int]:
    """int32 [L, U, E] and how many units a rank had in a microbatch."""
    info = trace.info
    L, E = info.num_layers, info.num_experts
    if _has_sequences(trace):
        table = trace.sequences(steps).sort_by(
            [(name, "ascending") for name in ("layer", "step", "microbatch", "group", "rank", "sequence")]
        )
        if table.num_rows:
            counts = table["counts"].combine_chunks().flatten().to_numpy().reshape(L, -1, E)
            return counts, int(table["sequence"].to_numpy().max()) + 1
    blocks = list(_recorded(trace, steps))
    return np.concatenate([block.load_NPE for block in blocks], 1), 1


def _has_sequences(trace: "Trace") -> bool:
    return any(file.table == "sequences" for file in trace.files)


def _range(steps: tuple[int, int] | None) -> str:
    return "" if steps is None else f" in steps {steps[0]} to {steps[1]}"
