"""What a prediction holds for, in the words that `equipoise trace` and `equipoise simulate` share."""

from collections.abc import Callable

TOKENS_PER_RANK = 8192
"""Of a microbatch, where nothing says how a training will lay its tokens out."""

TRACED = "transformers"
"""First word of the source of a trace that `equipoise trace` wrote: its batches are nobody's microbatches."""

_LAST_DOUBLING = 6


def assumptions(ep_size: int, tokens_per_rank: float, copy_tokens: int, hardware: str) -> str:
    """The EP size, the tokens of a rank's microbatch, and the machine's copies in tokens of one expert."""
    return (
        f"EP {ep_size}, {tokens_per_rank:.0f} tokens per rank in a microbatch, a copy as {copy_tokens} tokens of an "
        f"expert ({hardware})"
    )


def turning_point(tokens_per_rank: float, pays_here: bool, pays: Callable[[float], bool | None]) -> str:
    """From how many tokens per rank on balancing pays, to a factor of two, as the end of a sentence.

    pays: whether it pays with that many times the tokens, for a load as uneven. Asked up to 64 times as many where it
    does not pay here, else down to a 64th, or to where the answer is None.
    """
    factor = 1.0
    for _ in range(_LAST_DOUBLING):
        following = factor / 2 if pays_here else factor * 2
        if tokens_per_rank * following < 1:
            break
        answer = pays(following)
        if answer is None:
            break
        if answer != pays_here:
            turn = tokens_per_rank * (factor if pays_here else following)
            return f"with as uneven a load it pays from about {turn:.0f} tokens per rank on"
        factor = following
    last = f"with {tokens_per_rank * factor:.0f} tokens per rank"
    return (
        f"with as uneven a load it pays {last} too"
        if pays_here
        else f"with as uneven a load it does not pay {last} either"
    )
