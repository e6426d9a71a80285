"""Operations that happen once, however often a forward is run again."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes


def unseen() -> AbstractContextManager:
    """Hides operations from dispatch modes. Selective checkpointing lists a forward's operations and refuses a
    recompute that has others; what the balancer decides and sends is not repeated there, so it must not be listed."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
