"""What holds for all tests: without an accelerator, Triton kernels run in Triton's interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel's file is imported, so set before any is
    from triton_interpreter import quicken

    quicken()
