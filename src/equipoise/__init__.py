"""Equipoise trains Mixture-of-Experts language models with expert parallelism on any PyTorch accelerator.

Importing this package (or any of its subpackages) starts no device, changes no environment variable and
draws no random number.
"""

__version__ = "0.1.0"
