"""The load file of a trace, in the schema of `observe/`: what `equipoise simulate` and `equipoise view` read."""

from pathlib import Path

from equipoise.observe.schema import TraceInfo
from equipoise.observe.tables import LayerRows
from equipoise.observe.writer import TraceWriter
from equipoise.simulate.assumptions import TRACED
from equipoise.trace.collect import Traced


def write_counts(folder: Path, traced: Traced) -> None:
    """Writes each batch as a step of one rank, with the counts of its sequences. Raises TraceError where the folder
    cannot be written."""
    num_layers, num_sequences, num_experts = traced.counts_LNE.shape
    info = TraceInfo(
        num_layers=num_layers,
        num_experts=num_experts,
        num_experts_per_tok=traced.num_experts_per_tok,
        ep_size=1,
        hidden_size=traced.hidden_size,
        moe_intermediate_size=traced.expert_size.intermediate_size,
        sequence_length=traced.sequence_length,
        dtype=traced.dtype,
        device=traced.device,
        source=f"{TRACED} {traced.model_type}",
    )
    with TraceWriter(folder, info) as writer:
        for step, start in enumerate(range(0, num_sequences, traced.batch_size), 1):
            counts_LBE = traced.counts_LNE[:, start : start + traced.batch_size]
            load_LPE = counts_LBE.sum(1, keepdims=True)
            writer.write_layers(LayerRows(step, 0, 0, load_LPE, delivered_LPm=load_LPE))
            writer.write_sequences(step, 0, 0, 0, counts_LBE)
