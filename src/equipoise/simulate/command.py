"""What `equipoise simulate` does with its options. The options are in `cli.py`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from equipoise.errors import ConfigError, EquipoiseError
from equipoise.files import written_whole
from equipoise.observe.reader import Trace, open_trace
from equipoise.simulate.assumptions import TOKENS_PER_RANK, TRACED, turning_point
from equipoise.simulate.hardware import ExpertSize, Hardware, expert_size, load_hardware
from equipoise.simulate.loads import LOGNORMAL, drawn_loads, exact_loads, trace_loads, workload_name
from equipoise.simulate.report import show, verdicts
from equipoise.simulate.run import EXACT_LOAD
from equipoise.simulate.sweep import LoadsOf, Sweep, pays_with, run_sweep


@dataclass(frozen=True)
class WorkloadSize:
    """What a stated workload needs beyond its name. tokens: of each rank in a microbatch; None takes the default, or
    for a trace its own."""

    imbalance: float
    num_experts: int
    num_experts_per_tok: int
    tokens: int | None
    layers: int
    microbatches: int
    seed: int
    exact: bool


def parse_numbers(text: str, option: str, kind: type = int) -> list[Any]:
    """Numbers separated by commas.

    Raises:
        ConfigError: anything else; names the option.
    """
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or any(not number >= 0 for number in numbers):
        words = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"{option} is {text!r}: expected {words} from 0, separated by commas")
    return numbers


def run(
    trace_path: str | None,
    workload: str | None,
    size: WorkloadSize,
    sweep: Sweep,
    hardware_name: str,
    hidden_size: int | None,
    intermediate_size: int | None,
    steps: tuple[int, int] | None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Simulates, prints the report, and returns the rows and what was simulated.

    Raises:
        ConfigError: neither or both of a trace and a workload, or sizes that cannot be.
        TraceError: a trace that cannot be read or replayed.
    """
    console = Console(highlight=False)
    hardware = load_hardware(hardware_name)
    if (trace_path is None) == (workload is None):
        raise ConfigError("give a TRACE (a run folder, say) or --workload NAME, one of them")
    if trace_path is not None:
        trace = open_trace(trace_path)
        top_k, num_experts = trace.info.num_experts_per_tok, trace.info.num_experts
        tokens = size.tokens
        if tokens is None and trace.info.source.startswith(TRACED):
            tokens = TOKENS_PER_RANK
        expert = _expert_of(trace, hidden_size, intermediate_size)
        loads_of: LoadsOf = lambda ranks: trace_loads(trace, ranks, steps, tokens)  # noqa: E731
        what = f"trace {trace_path} ({trace.info.num_layers} layers, {trace.info.num_experts} experts)"
        if not sweep.ranks:
            sweep = _with_ranks(sweep, [trace.info.ep_size])
    else:
        assert workload is not None
        name = workload_name(workload)
        top_k, num_experts = size.num_experts_per_tok, size.num_experts
        expert = ExpertSize(hidden_size or 2048, intermediate_size or 768)
        loads_of = _workload_loads(name, size)
        what = f"workload {name}, {size.layers} layers x {size.microbatches} microbatches, {size.num_experts} experts"
        if not sweep.ranks:
            sweep = _with_ranks(sweep, [8])
    for ranks in sweep.ranks:
        if ranks < 1 or num_experts % ranks:
            raise ConfigError(
                f"--ranks is {ranks}, which does not divide the {num_experts} experts: choose one that does"
            )
    rows = run_sweep(sweep, loads_of, hardware, expert, say=lambda line: console.print(f"simulating {line}"))

    def turn(row: dict[str, Any], tokens_per_rank: float, pays: bool) -> str:
        if row["planner"] != EXACT_LOAD:  # others take their time, and may learn from step to step
            return ""
        loads = next(iter(loads_of(row["ranks"])))
        return turning_point(tokens_per_rank, pays, pays_with(sweep, loads, row, hardware, expert))

    lines = verdicts(rows, max(1, top_k), hardware.name, turn)
    show(console, rows, f"Predicted step on {hardware.name}: {what}", lines)
    console.print(_explain(hardware), markup=False, soft_wrap=True)
    about = {"what": what, "hardware": asdict(hardware), "expert": asdict(expert), "workload": asdict(size)}
    return rows, about


def _with_ranks(sweep: Sweep, ranks: list[int]) -> Sweep:
    return Sweep(**{**asdict(sweep), "ranks": ranks})


def _workload_loads(name: str, size: WorkloadSize) -> LoadsOf:
    from equipoise.moe.synthetic import Workload

    tokens = TOKENS_PER_RANK if size.tokens is None else size.tokens

    def loads(ranks: int):
        if size.exact:
            if name == LOGNORMAL:
                raise ConfigError(f"--exact lays shares down exactly, and {LOGNORMAL} has none: leave it out")
            stated = Workload(name, size.imbalance, size.num_experts, size.num_experts_per_tok, ranks)
            return exact_loads(stated, tokens, size.layers, size.microbatches)
        return drawn_loads(
            name,
            size.imbalance,
            size.num_experts,
            size.num_experts_per_tok,
            ranks,
            tokens,
            size.layers,
            size.microbatches,
            size.seed,
        )

    return loads


def _expert_of(trace: Trace, hidden_size: int | None, intermediate_size: int | None) -> ExpertSize:
    info = trace.info
    return expert_size(hidden_size or info.hidden_size, intermediate_size or info.moe_intermediate_size, info.dtype)


def _explain(hardware: Hardware) -> str:
    parts = "MoE layers and the rest of the step" if hardware.rest_s else "MoE layers alone"
    return (
        f"ms: one microbatch, forward and backward, {parts}. routed, planned, p95: largest over mean rank load before "
        "and after. copies: replicas of a layer. remote: rows that leave their rank. *: fastest.\n"
        f"Rates: {hardware.source}. docs/simulator.md has the model, and its error against measured runs."
    )


def write_json(path: Path, rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """The rows as a results file (the form of `bench`)."""
    import json

    try:
        with written_whole(path) as partial:
            partial.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    except OSError as error:
        raise EquipoiseError(f"cannot write {path}: {error.strerror or error}; choose another --out") from error
