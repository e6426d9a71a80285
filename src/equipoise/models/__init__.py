"""Decoder-only MoE language models with Hugging Face field names."""
