"""Memory for keys and values that dense prefill gathers from the paged cache.

Imports no torch: planning estimates a GPU's memory with it before there is one.
"""

from __future__ import annotations

DENSE_MIN_QUERIES = 640
"""Query tokens of a row from which on gathering its context pays."""
GATHER_CHUNK = 128
"""Positions that are gathered as one chunk."""
_MAX_BYTES = 2**29
"""Of keys and values: 131,072 tokens of 8 KV heads 128 wide in bfloat16."""


def gathered_tokens(token_bytes: int, tokens: int, length: int) -> int:
    """How many tokens there is memory for: as many as a step may need, or as fit into the limit.

    Args:
        token_bytes: Of a layer's keys and values of a token.
        tokens, length: Of the largest step, and of the longest sequence.
    """
    chunks = max(tokens, length) // GATHER_CHUNK + tokens // DENSE_MIN_QUERIES + 1
    return min(chunks, _MAX_BYTES // (GATHER_CHUNK * token_bytes)) * GATHER_CHUNK
