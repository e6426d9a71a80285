"""Text sources, tokenizers, packing and the resumable loader."""
