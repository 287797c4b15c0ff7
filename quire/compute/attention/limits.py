"""Limits of a step's attention: of a padded step, and of the memory of dense prefill. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

DENSE_MIN_QUERIES = 640
"""Query tokens of a row from which on gathering its context pays."""
GATHER_CHUNK = 128
"""Positions that are gathered as one chunk."""
_MAX_BYTES = 2**29
"""Of keys and values: 131,072 tokens of 8 KV heads 128 wide in bfloat16."""


@dataclass(frozen=True)
class PaddedLimits:
    """The maximum size of a padded step. Columns of its metadata are equally long each time, so that a graph can replay
    it. Its last row has no token.

    Attributes:
        tokens, rows: Of the step.
        decode_rows: Its rows of one token.
    """

    tokens: int
    rows: int
    decode_rows: int


def gathered_tokens(token_bytes: int, tokens: int, length: int) -> int:
    """How many tokens dense prefill gathers at most: as many as a step may need, or as fit into 512 MiB.

    Args:
        token_bytes: Bytes of a token's keys and values in one layer.
        tokens: Maximum tokens of a step.
        length: Tokens of the longest sequence.
    """
    chunks = max(tokens, length) // GATHER_CHUNK + tokens // DENSE_MIN_QUERIES + 1
    return min(chunks, _MAX_BYTES // (GATHER_CHUNK * token_bytes)) * GATHER_CHUNK
