"""The command `equipoise trace`."""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.errors import ConfigError
from equipoise.exit_codes import exit_codes
from equipoise.outputs import check_out_folder
from equipoise.simulate.assumptions import TOKENS_PER_RANK

HELP = (
    "Does a model need balancing? Runs a few batches of MODEL over a text, prints the load of each layer's experts, "
    "and predicts what exact-load balancing would gain at given EP sizes.\n\n"
    "MODEL is an MoE model of transformers: a folder, or an id of the hub (owner/name). It runs in one process, on the "
    "selected accelerator or the CPU, in the dtype of its weights; nothing is trained. The counts are written as a "
    "load trace.\n\n"
    "The prediction takes the experts' time as that of the busiest rank, a copy as the time of --copy-tokens, and "
    "the experts' share of a step by parameters; time of attention scores and of communication is not in it. "
    "`equipoise simulate` on the written trace adds communication, `equipoise bench balance` measures.\n\n"
    "\b\nExamples:\n"
    "  equipoise trace Qwen/Qwen3-30B-A3B --data notes.txt --ep 4,8\n"
    "  equipoise trace my-model --data corpus.jsonl --column body --batches 16 --tokens-per-rank 16384"
)


def trace_model(
    model: Annotated[str, typer.Argument(help="Folder or hub id of an MoE model of transformers.")],
    data: Annotated[
        str, typer.Option(help="Text to run: what data.source takes (a file, a folder, stdlib, hf://...).")
    ],
    column: Annotated[
        str | None, typer.Option(help="Field or column of JSONL and Parquet that holds the text.", show_default="text")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer: what data.tokenizer takes.", show_default="the model's")
    ] = None,
    ep: Annotated[str, typer.Option(help="EP sizes to predict for, separated by commas.")] = "2,4,8",
    batches: Annotated[int, typer.Option(min=1, help="Batches to run.")] = 8,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per batch.")] = 4,
    sequence_length: Annotated[int, typer.Option(min=8, help="Tokens per sequence.")] = 512,
    tokens_per_rank: Annotated[
        int, typer.Option(min=1, help="Tokens of a rank's microbatch in the training to predict.")
    ] = TOKENS_PER_RANK,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Replica slots per rank.", show_default="as many as are worth it, up to 4")
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="What a copy costs: h200, h100, or a file of `equipoise bench calibrate`.")
    ] = "h200",
    copy_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens that an expert computes in the time of one weight copy.",
            show_default="the hardware's",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the load trace; must not exist.", show_default="a new one in traces/")
    ] = None,
) -> None:
    """See HELP."""
    with exit_codes():
        from equipoise.balance.protocol import PlannerSettings
        from equipoise.data.hub import is_hub_id
        from equipoise.simulate.hardware import load_hardware

        sizes = _sizes(ep)
        machine = load_hardware(hardware)
        PlannerSettings(copy_tokens=copy_tokens or 0)  # refuses what it cannot take before the model is loaded
        if not Path(model).exists() and not is_hub_id(model):
            raise ConfigError(
                f"there is no model {model!r}: no such folder is here ({Path(model).absolute()}), and a model of the "
                "hub has the form owner/name"
            )
        folder = out or _new_folder(model)
        check_out_folder(folder)
        from equipoise.accelerator import get_accelerator

        device = get_accelerator().device()
        from equipoise.trace.collect import collect, load_model, read_sequences
        from equipoise.trace.file import write_counts
        from equipoise.trace.predict import predict
        from equipoise.trace.report import layer_table, prediction_table, verdicts

        sequences = read_sequences(data, column, tokenizer or model, sequence_length, batches * batch_size)
        traced = collect(load_model(model, device), sequences, batch_size, device)
        copies = machine.copy_tokens(traced.expert_size) if copy_tokens is None else copy_tokens
        predictions = [predict(traced, size, tokens_per_rank, slots, copies) for size in sizes]
        write_counts(folder, traced)
        num_sequences, length = sequences.shape
        typer.echo(
            f"{traced.model_type}: {len(traced.layers)} MoE layers of {traced.num_experts} experts, "
            f"{traced.num_experts_per_tok} per token; {num_sequences} sequences of {length} tokens\n"
        )
        typer.echo(layer_table(traced, predictions))
        typer.echo(f"\nPredicted, with experts as {traced.expert_share:.0%} of an even step:\n")
        typer.echo(prediction_table(traced, predictions))
        if any(p.samples == 0 for p in predictions):
            typer.echo(
                "\nFewer than one microbatch of all ranks was run for some EP sizes; its load was scaled up, which "
                "overstates the unevenness. Raise --batches for a better prediction."
            )
        for line in ["", *verdicts(traced, predictions, machine.name), f"Loads written to {folder}"]:
            typer.echo(line)


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 2:
        raise ConfigError(f"--ep is {text!r}: expected EP sizes of at least 2, separated by commas, such as 2,4,8")
    return sizes


def _new_folder(model: str) -> Path:
    """The first free one of traces/NAME, traces/NAME-2, ..."""
    name, number = Path(model).resolve().name if Path(model).exists() else model.replace("/", "--"), 1
    while True:
        folder = Path("traces") / (name if number == 1 else f"{name}-{number}")
        if not folder.exists():
            return folder
        number += 1
