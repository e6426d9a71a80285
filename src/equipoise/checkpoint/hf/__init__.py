"""Hugging Face checkpoints in and out."""

from equipoise.checkpoint.hf.mapping import HFMapping, Piece, native_to_hf

__all__ = ["HFMapping", "Piece", "native_to_hf"]
