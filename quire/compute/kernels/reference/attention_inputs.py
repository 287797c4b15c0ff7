"""Named tuples of what attention kernels take, and which keys a query sees.

They are tuples because several are made for each layer of each step. Columns are int64 tensors.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from quire.compute.kernels.reference.lora import RowUpdate


class PagedKV(NamedTuple):
    """A layer's keys and values in the paged cache.

    Attributes:
        keys, values: [blocks, block_size, kv_heads, d]. `heads / kv_heads` adjacent query heads share a KV head.
            Entries that no query sees may be undefined, even NaN. Keys that are values too are one tensor.
        scales: [2, kv_heads] fp32 of a quantized cache: keys and values are stored divided by them. Queries are already
            multiplied by the keys' scales, and kernels multiply sums of values. None: the cache is not quantized.
    """

    keys: Tensor
    values: Tensor
    scales: Tensor | None = None


class CacheWrite(NamedTuple):
    """Where a step's keys and values are stored.

    Attributes:
        kv: The cache, which is written in place.
        slot_mapping: [tokens], each token's block · block_size + offset.
    """

    kv: PagedKV
    slot_mapping: Tensor


class NormRopeForm(NamedTuple):
    """How a layer norms and rotates its queries and keys, alike in all steps.

    Attributes:
        interleaved: Whether pairs (2i, 2i + 1) are rotated instead of pairs (i, i + r/2).
        centered: Whether the norm is a layer norm, which also takes off the mean.
        norm_last: Whether the rotation comes before the norm.
        clip: The bound of the magnitudes of queries, keys and values before all norms; None: no bound.
        values: What becomes of values: they stay as projected; each head is divided by the root of its mean square; or
            they are made of the projected keys and then `normed`, and are not projected themselves.
        stores: Whether keys and values are projected and stored; otherwise, queries read what is in the cache.
    """

    interleaved: bool = False
    centered: bool = False
    norm_last: bool = False
    clip: float | None = None
    values: Literal["projected", "normed", "keys"] = "projected"
    stores: bool = True


class QKNormRope(NamedTuple):
    """The processing of queries and keys before attention: an update by adapters, bounds, a norm, a rotation.

    Attributes:
        norm: [heads + kv_heads, d], the weight of the norm; None: no norm. Without stored keys, [heads, d].
        eps: Added to the mean square.
        cos, sin: [tokens, r/2], of each token's position, as in `rotary`; None: no rotation.
        update: Is added to queries, keys and values before all else; None: no update.
        form: The kind and the order of these.
        bias: [heads + kv_heads, d], the bias of a layer norm; None: no bias.
        mean_squares: [tokens, 2] fp32, the mean squares of all queries and of all keys, if their heads are normed
            together (`qk_mean_squares`); None: each head is normed by itself.
        query_scale: [tokens] fp32, the last factor of the token's queries; None: no factor.
    """

    norm: Tensor | None = None
    eps: float = 0.0
    cos: Tensor | None = None
    sin: Tensor | None = None
    update: RowUpdate | None = None
    form: NormRopeForm = NormRopeForm()
    bias: Tensor | None = None
    mean_squares: Tensor | None = None
    query_scale: Tensor | None = None


class Scores(NamedTuple):
    """How products of queries and keys become scores.

    Attributes:
        scale: The factor of products.
        cap: A bound c of scores, which become c · tanh(score / c); None: no bound.
        sinks: [heads] fp32, for each query head the score of one more key, which has no value: the softmax starts with
            it (Xiao et al. 2023, "attention sinks", learned). Neither scale nor bound applies. None: no such key.
        slopes: [heads] fp32, for each query head what a key's score grows by for each position that it is nearer to its
            query (Press et al. 2021, "ALiBi"); without a bound only. None: scores do not depend on distances.
    """

    scale: float
    cap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None


class Mask(NamedTuple):
    """The keys that a query sees; `visible_range` and `tile_mask` compute them.

    Attributes:
        window: A query sees the key of its own token and of the `window - 1` tokens before it; None: of all tokens
            before it.
        chunk: Positions are divided into chunks of this length, and a query sees the tokens of its own chunk up to its
            own token; None: they are not divided. A mask has a window or chunks, not both.
        two_sided: Whether a query also sees tokens behind its own, with a window `window - 1` of them, as in encoders;
            without chunks only. All tokens of such a row are computed in one step.
    """

    window: int | None = None
    chunk: int | None = None
    two_sided: bool = False


class PagedRows(NamedTuple):
    """A step's rows, and where their contexts are in the paged cache.

    Attributes:
        block_table: [slots, n] block ids. Entries of blocks that no query sees are not used.
        slots: [rows], each row's line in the block table.
        starts: [rows], each row's tokens before the step.
        counts: [rows], each row's tokens in the step.
    """

    block_table: Tensor
    slots: Tensor
    starts: Tensor
    counts: Tensor


class DecodeRows(NamedTuple):
    """Rows of one token.

    Attributes:
        rows: [n], their row numbers; -1 is padding.
        tokens: [n], the place of each row's token in the batch.
    """

    rows: Tensor
    tokens: Tensor


class QueryTiles(NamedTuple):
    """Rows of several tokens, cut into tiles of query tokens.

    Attributes:
        rows: [tiles], each tile's row.
        offsets: [tiles], the offset of the tile's first token among the row's tokens in this step. A tile at 0 of a row
            without tokens is padding.
        first_tokens: [rows], the place of each row's first token in the batch.
    """

    rows: Tensor
    offsets: Tensor
    first_tokens: Tensor


class KVSplits(NamedTuple):
    """How tiles' keys are split. Each tile is repeated, in order, for each of its splits.

    Attributes:
        numbers: [tiles], the number of the split within its tile, from 0.
        counts: [tiles], the maximum number of the tile's splits; 0 is padding.
    """

    numbers: Tensor
    counts: Tensor


class GatherChunks(NamedTuple):
    """Chunks of contexts that are copied out of the paged cache.

    Attributes:
        rows: [chunks], each chunk's row.
        offsets: [chunks], its first position in the row's context.
        counts: [chunks], how many of its positions exist.
    """

    rows: Tensor
    offsets: Tensor
    counts: Tensor


class DenseTiles(NamedTuple):
    """Tiles of query tokens whose contexts are contiguous.

    Attributes:
        tokens: [tiles], the place of a tile's first token in the batch.
        queries: [tiles], the number of its tokens.
        contexts: [tiles], the positions of its context before its first token.
        bases: [tiles], where its context begins among the gathered keys.
    """

    tokens: Tensor
    queries: Tensor
    contexts: Tensor
    bases: Tensor


def visible_range(mask: Mask, first: int, end: int, length: int) -> tuple[int, int]:
    """Return the begin and end of the keys that queries at positions `first` to `end` - 1 see together, of a row that
    has `length` keys.
    """
    if mask.chunk is not None:
        return first // mask.chunk * mask.chunk, end
    begin = 0 if mask.window is None else max(0, first + 1 - mask.window)
    if mask.two_sided:
        end = length if mask.window is None else min(length, end - 1 + mask.window)
    return begin, end


def tile_mask(mask: Mask, queries: Tensor, keys: Tensor) -> Tensor:
    """Return [queries, keys] bool: whether each query sees each key, by their positions."""
    seen = (keys >= 0) | (queries[:, None] >= 0) if mask.two_sided else keys <= queries[:, None]
    if mask.window is not None:
        seen &= keys > queries[:, None] - mask.window
    if mask.two_sided and mask.window is not None:
        seen &= keys < queries[:, None] + mask.window
    if mask.chunk is not None:
        seen &= keys >= queries[:, None] // mask.chunk * mask.chunk
    return seen
