"""Triton's interpreter without what takes most of its time and no test of ours needs.

It replaces all functions of `triton.language` again for each call of a function within a kernel, though the launch has
done that; and it checks each sum and product of integers for overflow, in two more operations of 64 bits. Results are
compared with references here, so an overflow shows as well. Kernels run three times as fast.
"""

import dataclasses
from typing import Any


def quicken() -> None:
    """For this process and those forked from it. Versions of Triton that are built otherwise stay as they are."""
    try:
        from triton import language
        from triton.runtime import interpreter

        original, scope_class = interpreter._patch_lang, interpreter._LangPatchScope
        options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    except (ImportError, AttributeError, TypeError):
        return
    replaced: set[int] = set()  # modules of the language, while a launch is under way

    def patch_lang(fn: Any) -> Any:
        modules = {id(value) for value in fn.__globals__.values() if value is language or value is language.core}
        if replaced and modules <= replaced:
            return scope_class()
        is_launch, scope = not replaced, original(fn)
        replaced.update(modules)
        if is_launch:  # which restores what it replaced when it ends; a call within leaves that to it
            restore = scope.restore
            scope.restore = lambda: (replaced.clear(), restore())
        return scope

    interpreter._patch_lang, interpreter.interpreter_builder.options = patch_lang, options
