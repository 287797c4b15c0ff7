"""Room for contexts that the attention of long rows reads in one piece of memory.

Imports no torch: what an engine will take of a GPU is estimated by it too, before there is one.
"""

from __future__ import annotations

DENSE_MIN_QUERIES = 640
"""Query tokens from which on it pays to bring a context into one piece."""
PACK = 128
"""Contexts are packed in pieces of so many tokens."""
_MOST_BYTES = 2**29
"""Of keys and values: 131,072 tokens of 8 KV heads 128 wide in bfloat16."""


def gathered_tokens(token_bytes: int, tokens: int, length: int) -> int:
    """How many tokens there is room for: as many as a step may need, or as fit.

    Args:
        token_bytes: Of a layer's keys and values of a token.
        tokens, length: Of the largest step, and of the longest sequence.
    """
    pieces = max(tokens, length) // PACK + tokens // DENSE_MIN_QUERIES + 1
    return min(pieces, _MOST_BYTES // (PACK * token_bytes)) * PACK
