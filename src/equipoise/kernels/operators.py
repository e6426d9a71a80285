"""Functions as operators of torch: opaque to its compiler, and seen by dispatch modes under their names.

As `torch.library.custom_op`, at a fraction of its time on the host: that one runs several Python functions around each
call, which look for results that share memory with arguments, count changes of arguments, and have an answer to
gradients. None of this is done here. So an operator returns new tensors, and whoever wants gradients wraps it in a
`torch.autograd.Function`, or registers them with `torch.library.register_autograd`, which takes the host longer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("equipoise", "FRAGMENT")


def operator(name: str, mutates_args: Sequence[str] = (), schema: str | None = None) -> Callable[[Callable], Any]:
    """Makes a function the operator `equipoise::name` on all devices.

    Args:
        mutates_args: names of the tensors that it changes.
        schema: of its arguments and results; by default that of its annotations.

    The operator is what the name then stands for. Its form without values, for the compiler, comes with
    `torch.library.register_fake`.
    """

    def register(function: Callable) -> Any:
        _LIBRARY.define(
            name + (schema or torch.library.infer_schema(function, mutates_args=tuple(mutates_args))),
            tags=(torch.Tag.pt2_compliant_tag,),
        )
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        return getattr(torch.ops.equipoise, name).default

    return register
