"""A small configuration tree with every kind of setting, for the tests of loader and command line."""

import enum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from equipoise.config import Config
from equipoise.errors import ConfigError


class Precision(enum.Enum):
    FP32 = "fp32"
    BF16 = "bf16"


class ModelSection(Config):
    """Shape of the model."""

    num_experts: int = Field(default=4, ge=1, le=1024)
    """Logical experts of a layer."""
    num_experts_per_tok: int = Field(default=2, ge=1)
    """Experts that a token is sent to."""
    mlp_only_layers: tuple[int, ...] = ()
    """Layers without experts."""
    window: int | None = None
    """Attention window in tokens; none attends to all."""
    tie_word_embeddings: bool = True
    norm_topk_prob: bool = False

    @model_validator(mode="after")
    def _top_k_within_experts(self) -> "ModelSection":
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"model.num_experts_per_tok is {self.num_experts_per_tok}: at most model.num_experts "
                f"({self.num_experts})"
            )
        return self


class DataSection(Config):
    """Text to train on."""

    path: Path | None = None
    tokenizer: str = "bytes"
    names: list[str] = []
    weights: dict[str, float] = {}
    shape: tuple[int, float] = (1, 0.5)
    tags: frozenset[str] = frozenset()
    precision: Precision = Precision.FP32

    @field_validator("tokenizer")
    @classmethod
    def _no_blanks(cls, value: str) -> str:
        if " " in value:
            raise ValueError("a tokenizer's name has no blanks")
        return value


class TrainSection(Config):
    """Training loop."""

    steps: int = Field(default=10, ge=0)
    """Optimizer steps."""
    compile: bool = False
    """Whether to compile | fuse the model."""
    ep_size: int = 1
    behaviour: Literal["finish", "fail", "crash", "killed", "wait", "stubborn"] = "finish"
    acting_rank: int = 0
    no_decay: bool = False
    recompute: bool | Literal["auto"] = "auto"
    limit: float | Literal["none"] = "none"


class OptimizerSection(Config):
    lr: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "constant"] = "cosine"
    clip: float | None = 1.0
    betas: tuple[float, float] = (0.9, 0.95)


class BalanceSection(Config):
    """Expert balancing."""

    slots: int = Field(default=1, ge=0)
    mode: Literal["exact", "fast"] = "exact"


class ToyConfig(Config):
    """The whole tree."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    balance: BalanceSection | None = None
    label: str | None = None

    @model_validator(mode="after")
    def _experts_over_ranks(self) -> "ToyConfig":
        if self.model.num_experts % self.train.ep_size:
            raise ValueError(
                f"train.ep_size is {self.train.ep_size}: it must divide model.num_experts ({self.model.num_experts})"
            )
        return self

    def check_world(self, world_size: int) -> None:
        if world_size % self.train.ep_size:
            raise ConfigError(f"train.ep_size is {self.train.ep_size}, which does not divide {world_size} ranks")
