"""Limits of a step's attention: the size of a padded step, and the memory of dense prefill. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

DENSE_MIN_QUERIES = 640
"""The number of query tokens of a row from which gathering its context is faster."""
GATHER_CHUNK = 128
"""Positions that are gathered as one chunk."""
_MAX_BYTES = 2**29
"""The maximum bytes of gathered keys and values: 131,072 tokens of 8 KV heads 128 wide in bfloat16."""


@dataclass(frozen=True)
class PaddedLimits:
    """The maximum tokens, rows, and rows of one token of a padded step, whose last row has no token.

    Columns of its metadata are equally long each time, so that a graph can replay it.
    """

    tokens: int
    rows: int
    decode_rows: int


def gathered_tokens(token_bytes: int, tokens: int, length: int) -> int:
    """Return how many tokens dense prefill gathers at most: as many as a step of at most `tokens` and a longest
    sequence of `length` may need, or as fit into 512 MiB if a token's keys and values in one layer have
    `token_bytes`."""
    chunks = max(tokens, length) // GATHER_CHUNK + tokens // DENSE_MIN_QUERIES + 1
    return min(chunks, _MAX_BYTES // (GATHER_CHUNK * token_bytes)) * GATHER_CHUNK
