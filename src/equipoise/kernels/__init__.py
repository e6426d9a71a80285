"""Compute kernels, each beside its plain PyTorch reference."""
