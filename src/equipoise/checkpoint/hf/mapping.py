"""Which tensor of a Hugging Face checkpoint holds which region of which parameter of ours.

Shapes: E experts, D hidden features, I features of an expert.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import torch

from equipoise.checkpoint.tensors import Stored, model_tensors
from equipoise.errors import CheckpointError
from equipoise.models.config import ModelConfig
from equipoise.models.families import FAMILIES, ExpertLayout, Family, misfits
from equipoise.models.model import MoEForCausalLM

GATE_UP, DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


class Piece(NamedTuple):
    """One tensor of a checkpoint and the region of our parameter that it is.

    start, size: the region, one number per dim of our parameter.
    is_slice: whether its leading dim, of size 1, is absent in the checkpoint.
    transposed: whether its last two dims are swapped in the checkpoint.
    """

    key: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    is_slice: bool = False
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint."""
        shape = self.size[1:] if self.is_slice else self.size
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    def as_stored(self, region: torch.Tensor) -> torch.Tensor:
        """A view of `region` (of our parameter, in this piece) as the checkpoint has it."""
        tensor = region.squeeze(0) if self.is_slice else region
        return tensor.transpose(-1, -2) if self.transposed else tensor

    def as_ours(self, stored: torch.Tensor) -> torch.Tensor:
        """The inverse of `as_stored`."""
        tensor = stored.transpose(-1, -2) if self.transposed else stored
        return tensor.unsqueeze(0) if self.is_slice else tensor


class HFMapping:
    """Names, shapes and layout of a model's tensors on both sides.

    Args:
        config: the model.
        family: the family of the checkpoint; None takes the one that can express the model.
        experts: layout of the experts in the checkpoint; None takes the one that the family writes.

    Raises:
        CheckpointError: no family can express the model, or the family has no such layout.
    """

    def __init__(self, config: ModelConfig, family: Family | None = None, experts: ExpertLayout | None = None) -> None:
        self.config = config
        self.family = family if family is not None else family_of_model(config)
        self.experts: ExpertLayout = experts or self.family.expert_layouts[0]
        if self.experts not in self.family.expert_layouts:
            raise CheckpointError(
                f"{self.family.model_type} checkpoints have no {self.experts!r} experts: choose one of "
                f"{', '.join(self.family.expert_layouts)}"
            )

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """Our parameters and persistent buffers by name, a tied one once; with the dtypes of master weights."""
        with torch.device("meta"):
            model = MoEForCausalLM(self.config)
        return {name: Stored(tuple(t.shape), t.dtype) for name, t in model_tensors(model).items()}

    @cached_property
    def copies(self) -> dict[str, str]:
        """Tensors of the checkpoint that repeat another of it: copy to original. They may be absent."""
        copies = dict(self.family.copies(self.config))
        if self.config.tie_word_embeddings:
            copies["lm_head.weight"] = self.family.key("model.embed_tokens.weight")
        return copies

    @cached_property
    def sources(self) -> dict[str, tuple[str, Piece]]:
        """Every tensor that the checkpoint has to have: its key to our parameter's name and the piece of it."""
        return {piece.key: (name, piece) for name in self.tensors for piece in self.pieces(name)}

    def pieces(self, name: str) -> list[Piece]:
        """The tensors of the checkpoint that together are our parameter `name`, each region once."""
        return list(self._pieces(name, self.tensors[name].shape, 0))

    def _pieces(self, name: str, shape: tuple[int, ...], first_expert: int) -> Iterator[Piece]:
        for piece in _pieces(name, shape, self.experts, first_expert):
            yield piece._replace(key=self.family.key(piece.key))

    def to_hf(
        self, name: str, tensor: torch.Tensor, first_expert: int = 0, copies: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names in the checkpoint and values, from our parameter `name`; views, nothing is copied.

        Args:
            tensor: plain and whole, of any dtype and device; or, of stacked experts in layout per_expert, those from
                `first_expert` on that are at hand.
            copies: whether tensors of the checkpoint that repeat this one are given as well.
        """
        whole = self.tensors[name].shape
        parts = tensor.dim() == len(whole) and tensor.shape[1:] == torch.Size(whole[1:])
        is_whole = parts and tensor.shape[0] == whole[0]
        if not is_whole and not (parts and _is_stacked(name) and self.experts == "per_expert"):
            raise CheckpointError(f"{name!r} has shape {list(tensor.shape)}; expected {list(whole)}")
        for piece in self._pieces(name, tuple(tensor.shape), first_expert):
            start = (piece.start[0] - first_expert, *piece.start[1:]) if piece.start else ()
            region = tensor[tuple(slice(a, a + n) for a, n in zip(start, piece.size))]
            yield piece.key, piece.as_stored(region)
        if copies and name in self.written_copies:
            for key in self.written_copies[name]:
                yield key, tensor

    @cached_property
    def written_copies(self) -> dict[str, list[str]]:
        """What an export repeats: original to copies. The head of tied embeddings is not, as transformers has it."""
        found: dict[str, list[str]] = {}
        for copy, original in self.family.copies(self.config).items():
            found.setdefault(original, []).append(copy)
        return found


def native_to_hf(
    mapping: HFMapping, tensors: Iterable[tuple[str, torch.Tensor]], first_expert: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Streams our (name, tensor) into the checkpoint's (name, tensor); see `HFMapping.to_hf`."""
    for name, tensor in tensors:
        yield from mapping.to_hf(name, tensor, first_expert)


def family_of_model(config: ModelConfig) -> Family:
    """The family whose `config.json` can express the model. Raises CheckpointError if there is none."""
    reasons: Mapping[Family, list[str]] = {family: misfits(family, config) for family in FAMILIES}
    for family, found in reasons.items():
        if not found:
            return family
    listed = "; ".join(f"{family.model_type}: {', '.join(found[:4])}" for family, found in reasons.items())
    raise CheckpointError(f"no Hugging Face family that is known here can express this model. {listed}")


def _is_stacked(name: str) -> bool:
    return name.endswith((GATE_UP, DOWN))


def _pieces(name: str, shape: tuple[int, ...], experts: ExpertLayout, first_expert: int) -> Iterator[Piece]:
    if not _is_stacked(name):
        yield Piece(name, (0,) * len(shape), shape)
    elif experts == "per_expert":
        num_experts, rows, columns = shape
        prefix = name.rpartition(".")[0]
        for expert in range(first_expert, first_expert + num_experts):
            if name.endswith(DOWN):
                yield Piece(f"{prefix}.{expert}.down_proj.weight", (expert, 0, 0), (1, rows, columns), True)
                continue
            half = (1, rows // 2, columns)
            yield Piece(f"{prefix}.{expert}.gate_proj.weight", (expert, 0, 0), half, True)
            yield Piece(f"{prefix}.{expert}.up_proj.weight", (expert, rows // 2, 0), half, True)
    else:
        yield Piece(name, (0,) * len(shape), shape, transposed=experts == "transposed")


def pieces_per_expert(name: str, shape: tuple[int, ...]) -> list[Piece]:
    """The tensors that together are our parameter of this whole shape, where each expert has its own: as on the Hub,
    and as serving engines take them. For any model, also one that no family expresses."""
    return list(_pieces(name, shape, "per_expert", 0))
