"""Runs a model of transformers over a text and counts, by hooks, which experts its routers choose.

Shapes: L MoE layers, B sequences of S tokens, N sequences in all, K experts per token, E experts.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from equipoise.data import DataConfig, load_tokenizer
from equipoise.data.corpus import tokenize
from equipoise.data.hub import reachable_model
from equipoise.data.sources import SourceReport, read_documents
from equipoise.errors import ConfigError, DataError
from equipoise.simulate.hardware import ExpertSize, expert_size


@dataclass(frozen=True)
class Traced:
    """What was counted, and the sizes of the model that a prediction needs.

    counts_LNE: int64, tokens of each sequence for each expert. batch_size: sequences that ran together.
    expert_parameters: of one expert.
    dense_parameters: that every token passes, without the input embedding.
    """

    model_type: str
    layers: tuple[str, ...]
    counts_LNE: np.ndarray
    batch_size: int
    sequence_length: int
    num_experts_per_tok: int
    expert_parameters: int
    dense_parameters: int
    hidden_size: int
    dtype: str
    device: str

    @property
    def num_experts(self) -> int:
        """E."""
        return self.counts_LNE.shape[2]

    @property
    def expert_size(self) -> ExpertSize:
        """As the simulator takes it: three matrices, whatever the model has."""
        return expert_size(self.hidden_size, max(1, self.expert_parameters // (3 * self.hidden_size)), self.dtype)

    @property
    def expert_share(self) -> float:
        """Share of the routed experts in the products of one token, by parameters."""
        experts = len(self.layers) * self.num_experts_per_tok * self.expert_parameters
        return experts / (experts + self.dense_parameters)


def load_model(name: str, device: torch.device) -> nn.Module:
    """A causal language model of transformers, from a folder or the hub, in the dtype of its weights.

    Raises:
        ConfigError: no transformers, no such model, or one that transformers cannot load.
        DataError: a model of the hub, without a network and a copy of it.
    """
    try:
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"equipoise trace needs the package transformers (pip install 'equipoise[hf]'): {error}"
        ) from error
    found = name if Path(name).exists() else reachable_model(name)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(found, dtype="auto")
    except (
        OSError,
        ValueError,
        ImportError,
        LookupError,
        TypeError,
        AttributeError,
        RuntimeError,
        SafetensorError,
    ) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ConfigError(
            f"transformers cannot load {name!r} as a causal language model: {reason}. Give a folder with "
            "config.json and weights, or the id of a model on the hub (owner/name)"
        ) from error
    return model.to(device).eval().requires_grad_(False)


def read_sequences(source: str, column: str | None, tokenizer: str, length: int, count: int) -> np.ndarray:
    """int64 [N, S]: the beginning of the text, cut into at most `count` sequences.

    Raises:
        DataError: the source cannot be read, or has less than one sequence.
    """
    config = DataConfig(source=source, column=column, tokenizer=tokenizer)
    report = SourceReport(source)
    documents = read_documents(config, report)
    first = list(islice(documents, 1))  # a source that is not there is told before a tokenizer is fetched
    try:
        encoder = load_tokenizer(tokenizer)
    except DataError as error:
        raise DataError(f"{error}. --tokenizer names another one, such as bytes") from error

    def enough() -> Iterator[str]:
        size = 0
        for text in chain(first, documents):
            yield text
            size += len(text)
            if size > 16 * length * count:  # characters; tokens are seldom longer than 16
                return

    tokens = tokenize(enough(), encoder).tokens
    found = min(len(tokens) // length, count)
    if found == 0:
        raise DataError(
            f"--data {source} is too short: it has {len(tokens)} tokens, and one sequence takes {length}. Give more "
            "text, or a smaller --sequence-length"
        )
    return tokens[: found * length].reshape(found, length).astype(np.int64)


@contextmanager
def _counting(model: nn.Module, found: dict[str, list[torch.Tensor]]) -> Iterator[dict[str, Any]]:
    """Hooks on the modules that hold a layer's experts; each call adds ids_TK to `found`."""
    modules: dict[str, Any] = {name: m for name, m in model.named_modules() if _holds_experts(m)}

    def hook(name: str):
        def keep(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            ids = [t for t in tensors if t.dim() == 2 and t.dtype in (torch.int32, torch.int64)]
            if len(ids) == 1:
                found.setdefault(name, []).append(ids[0])

        return keep

    handles = [m.register_forward_pre_hook(hook(name), with_kwargs=True) for name, m in modules.items()]
    try:
        yield modules
    finally:
        for handle in handles:
            handle.remove()


def _holds_experts(module: nn.Module) -> bool:
    stacked = any(p.dim() == 3 for p in module.parameters(recurse=False))
    return stacked and isinstance(getattr(module, "num_experts", None), int)


def collect(model: Any, sequences_NS: np.ndarray, batch_size: int, device: torch.device) -> Traced:
    """Runs the model over the sequences and counts. No gradients, no logits.

    Raises:
        ConfigError: the model has no MoE layer, or one whose experts are not told the router's choice.
        DataError: a token that the model's vocabulary lacks.
    """
    kind = getattr(model.config, "model_type", type(model).__name__)
    vocabulary = model.get_input_embeddings().num_embeddings
    if sequences_NS.max() >= vocabulary:
        raise DataError(
            f"the tokenizer gives ids up to {sequences_NS.max()}, and {kind} has {vocabulary} embeddings: give its own "
            "tokenizer as --tokenizer"
        )
    ids_by_layer: dict[str, list[torch.Tensor]] = {}
    counts: dict[str, list[np.ndarray]] = {}
    with _counting(model, ids_by_layer) as modules, torch.no_grad():
        for start in range(0, len(sequences_NS), batch_size):
            batch = torch.from_numpy(sequences_NS[start : start + batch_size]).to(device)
            model.base_model(input_ids=batch, use_cache=False)
            if not ids_by_layer:
                raise ConfigError(
                    f"{type(model).__name__} (model type {kind!r}) has no MoE layer whose experts are given the "
                    f"router's choice ({len(modules)} modules with stacked experts found), so there is no load to trace"
                )
            for name, calls in ids_by_layer.items():
                counts.setdefault(name, []).append(_count(calls[-1], len(batch), modules[name].num_experts))
            ids_by_layer.clear()
    if len({part[0].shape[1] for part in counts.values()}) > 1:
        raise ConfigError(f"{kind!r} has layers with different numbers of experts, which one load file cannot hold")
    layers = tuple(name for name in modules if name in counts)
    first = modules[layers[0]]
    in_experts = {name: sum(p.numel() for p in modules[name].parameters()) for name in layers}
    counts_LNE = np.stack([np.concatenate(counts[name]) for name in layers])
    total, embedding = sum(p.numel() for p in model.parameters()), model.get_input_embeddings().weight.numel()
    tied = model.get_output_embeddings() is None or (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )
    return Traced(
        model_type=kind,
        layers=layers,
        counts_LNE=counts_LNE,
        batch_size=batch_size,
        sequence_length=sequences_NS.shape[1],
        num_experts_per_tok=int(counts_LNE[0, 0].sum()) // sequences_NS.shape[1],
        expert_parameters=in_experts[layers[0]] // first.num_experts,
        dense_parameters=total - sum(in_experts.values()) - (0 if tied else embedding),
        hidden_size=int(model.get_input_embeddings().embedding_dim),
        dtype=str(next(first.parameters()).dtype).removeprefix("torch."),
        device=device.type,
    )


def _count(ids_TK: torch.Tensor, num_sequences: int, num_experts: int) -> np.ndarray:
    """int64 [B, E]. Ids outside of [0, E) mean no expert."""
    ids_BX = ids_TK.reshape(num_sequences, -1).long()
    ids_BX = torch.where((ids_BX < 0) | (ids_BX >= num_experts), num_experts, ids_BX)
    counts_BE = ids_BX.new_zeros(num_sequences, num_experts + 1).scatter_add_(1, ids_BX, torch.ones_like(ids_BX))
    return counts_BE[:, :-1].cpu().numpy()


def short_name(layer: str) -> str:
    """`12` of `model.layers.12.mlp.experts`; the whole name where it has no number."""
    numbers = re.findall(r"\.(\d+)\.", layer)
    return numbers[0] if len(numbers) == 1 else layer
