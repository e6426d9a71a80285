"""Names of what the host does, for the profiler."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function


def named_range(name: str) -> AbstractContextManager[Any]:
    """`record_function(name)` while a profiler looks; else nothing, which costs the host nothing. The compiler, which
    cannot ask for a profiler, sees it always and leaves it out."""
    is_seen = torch.compiler.is_compiling() or torch.autograd._profiler_enabled()
    return record_function(name) if is_seen else nullcontext()
