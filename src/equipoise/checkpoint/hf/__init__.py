"""Hugging Face checkpoints in and out."""

from equipoise.checkpoint.hf.mapping import HFMapping, Piece, native_to_hf, pieces_per_expert
from equipoise.checkpoint.hf.quantization import dtype_of, parse_dtype
from equipoise.checkpoint.hf.source import FolderSource, Source, open_source
from equipoise.checkpoint.hf.write import export, hf_config

__all__ = [
    "FolderSource",
    "HFMapping",
    "Piece",
    "Source",
    "dtype_of",
    "export",
    "hf_config",
    "native_to_hf",
    "open_source",
    "parse_dtype",
    "pieces_per_expert",
]
