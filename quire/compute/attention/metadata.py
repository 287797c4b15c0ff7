"""What attention needs to know of a step beside its batch: which rows are decoded, which are prefilled, and in what
tiles; and how much memory dense prefill gathers keys and values into.

Made on the host as numpy arrays, which travel in the step's one copy to the device, and rebuilt there around tensors
(`AttentionMetadata.arrays`, `with_arrays`). All arrays are one-dimensional int64. Knows nothing about kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

DENSE_MIN_QUERIES = 640
"""Query tokens of a row from which on gathering its context pays."""
GATHER_CHUNK = 128
"""Positions that are gathered as one chunk."""
_MAX_BYTES = 2**29
"""Of keys and values: 131,072 tokens of 8 KV heads 128 wide in bfloat16."""

IntArray = npt.NDArray[np.int64]

A = TypeVar("A")
"""IntArray on the host, Tensor on the device."""
B = TypeVar("B")


@dataclass(frozen=True)
class DecodeMetadata(Generic[A]):
    """Rows of one token.

    Attributes:
        rows: [n] numbers of the rows; -1 is padding.
        tokens: [n] each row's token in the batch.
    """

    rows: A
    tokens: A

    def arrays(self) -> tuple[A, ...]:
        """Return the arrays in the order in which `with_arrays` takes them."""
        return self.rows, self.tokens

    def with_arrays(self, arrays: Iterator[B]) -> DecodeMetadata[B]:
        """Return a copy of this metadata whose arrays are the next ones of `arrays`."""
        return DecodeMetadata(next(arrays), next(arrays))


@dataclass(frozen=True)
class KVSplitMetadata(Generic[A]):
    """How each tile's keys are split. A tile stands among the tiles once for each of its splits.

    Attributes:
        numbers: [tiles] which split of its tile this is, from 0.
        counts: [tiles] how many splits the tile has, at most; 0 is padding.
    """

    numbers: A
    counts: A


@dataclass(frozen=True)
class PrefillMetadata(Generic[A]):
    """Rows of several tokens, cut into tiles of query tokens, which read the context through the block table.

    Attributes:
        tile_rows, tile_offsets: [tiles] a tile's row, and which of its tokens in this step is the tile's first. A tile
            at 0 of a row without tokens is padding.
        counts: [rows] tokens of every row of the step, of decode rows too.
        first_tokens: [rows] the place of each row's first token in the batch.
        splits: How the tiles' keys are split; None: they are not.
        dense_tiles: How many of the first tiles are of rows that DensePrefillMetadata serves too. Only layers with a
            window use these tiles.
    """

    tile_rows: A
    tile_offsets: A
    counts: A
    first_tokens: A
    splits: KVSplitMetadata[A] | None = None
    dense_tiles: int = 0

    def arrays(self) -> tuple[A, ...]:
        """Return the arrays in the order in which `with_arrays` takes them."""
        own = (self.tile_rows, self.tile_offsets, self.counts, self.first_tokens)
        return own if self.splits is None else (*own, self.splits.numbers, self.splits.counts)

    def with_arrays(self, arrays: Iterator[B]) -> PrefillMetadata[B]:
        """Return a copy of this metadata whose arrays are the next ones of `arrays`."""
        rows, offsets, counts, first_tokens = next(arrays), next(arrays), next(arrays), next(arrays)
        splits = None if self.splits is None else KVSplitMetadata(next(arrays), next(arrays))
        return PrefillMetadata(rows, offsets, counts, first_tokens, splits, self.dense_tiles)


@dataclass(frozen=True)
class DensePrefillMetadata(Generic[A]):
    """Rows of many tokens, whose keys and values are gathered out of the paged cache before attention.

    They are gathered chunk by chunk; then tiles of the rows' queries attend to them.

    Attributes:
        tile_tokens: [tiles] the place of a tile's first token in the batch.
        tile_queries: [tiles] how many tokens it has.
        tile_contexts: [tiles] positions of its row before the first of them.
        tile_bases: [tiles] where its row begins among the gathered keys.
        chunk_rows, chunk_offsets, chunk_counts: [chunks] a chunk's row, its first position, and how many it has.
    """

    tile_tokens: A
    tile_queries: A
    tile_contexts: A
    tile_bases: A
    chunk_rows: A
    chunk_offsets: A
    chunk_counts: A

    @property
    def tiles(self) -> tuple[A, A, A, A]:
        """The arrays of the tiles, in the order of the op `prefill_attention_dense`."""
        return self.tile_tokens, self.tile_queries, self.tile_contexts, self.tile_bases

    @property
    def chunks(self) -> tuple[A, A, A]:
        """The arrays of the chunks, in the order of the op `gather_kv`."""
        return self.chunk_rows, self.chunk_offsets, self.chunk_counts

    def arrays(self) -> tuple[A, ...]:
        """Return the arrays in the order in which `with_arrays` takes them."""
        return *self.tiles, *self.chunks

    def with_arrays(self, arrays: Iterator[B]) -> DensePrefillMetadata[B]:
        """Return a copy of this metadata whose arrays are the next ones of `arrays`."""
        return DensePrefillMetadata(*(next(arrays) for _ in range(7)))


@dataclass(frozen=True)
class AttentionMetadata(Generic[A]):
    """The metadata of a step. Without any part, every row is a decode row and has the token of its own number."""

    decode: DecodeMetadata[A] | None = None
    prefill: PrefillMetadata[A] | None = None
    dense_prefill: DensePrefillMetadata[A] | None = None

    def arrays(self) -> tuple[A, ...]:
        """Return the arrays of all parts, in the order in which `with_arrays` takes them."""
        arrays: tuple[A, ...] = () if self.decode is None else self.decode.arrays()
        if self.prefill is not None:
            arrays += self.prefill.arrays()
        if self.dense_prefill is not None:
            arrays += self.dense_prefill.arrays()
        return arrays

    def with_arrays(self, arrays: Sequence[B]) -> AttentionMetadata[B]:
        """Return a copy of this metadata with other arrays, for example those of `arrays` copied to a device."""
        left = iter(arrays)
        return AttentionMetadata(
            None if self.decode is None else self.decode.with_arrays(left),
            None if self.prefill is None else self.prefill.with_arrays(left),
            None if self.dense_prefill is None else self.dense_prefill.with_arrays(left),
        )


@dataclass(frozen=True)
class PaddedLimits:
    """What a padded step has at most. Its metadata's arrays are always equally long, so that it can be replayed from a
    graph. The last of its rows has no token.

    Attributes:
        tokens, rows: Of the step.
        decode_rows: Its rows of one token.
    """

    tokens: int
    rows: int
    decode_rows: int


def gathered_tokens(token_bytes: int, tokens: int, length: int) -> int:
    """How many tokens there is memory for: as many as a step may need, or as fit into the limit.

    Args:
        token_bytes: Of a layer's keys and values of a token.
        tokens, length: Of the largest step, and of the longest sequence.
    """
    chunks = max(tokens, length) // GATHER_CHUNK + tokens // DENSE_MIN_QUERIES + 1
    return min(chunks, _MAX_BYTES // (GATHER_CHUNK * token_bytes)) * GATHER_CHUNK
