"""Attention on a GPU, from kernels in Triton.

Rows of one token are cut along their contexts, longer rows along their queries, and long prompts have a kernel of their
own where the card has the means; each is one launch, whatever the mix. A step in which every row has one token asks
nothing of the host but the number of its rows: it can be recorded as a graph and replayed at any lengths. So can one
whose columns are padded to the length that its number of rows and tokens asks for at most.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attention import gathered_kv, tiling
from quire.attention.backend import AttentionLayer, Ints, KVView, QKNormRope, Room, Rows
from quire.attention.branch import Branch
from quire.attention.tiling import Kinds, TileSizes
from quire.errors import ConfigError
from quire.kernels.dispatch import kernel
from quire.kernels.reference.paged_attention import KV_SPLIT_COLUMNS, new_decode_partials, new_prefill_partials
from quire.kernels.triton.attention import prefill_dense, prefill_split_kv
from quire.kernels.triton.attention.decode import FEWEST, keys_of_tile, kv_splits_at_once, kv_splits_for
from quire.kernels.triton.attention.prefill import queries_of_tile, tile_shape

_WIDEST, _LARGEST_GROUP = 256, 16
_COLUMNS_WITH_PARTS = 8
"""Of a step whose tiles are cut so; others have two fewer, or those of long rows behind them."""


@dataclass(frozen=True)
class _Singles:
    """Rows of one token; None: all rows, and each one's token is its number."""

    rows: Tensor | None
    tokens: Tensor | None
    number: int


@dataclass(frozen=True)
class _Tiles:
    """Longer rows, cut into tiles; see the kernels prefill_attention and prefill_attention_split_kv.

    Attributes:
        columns: Rows and offsets, numbers of parts and how many there are if tiles have parts; starts, counts, firsts
            and slots.
        in_parts: Whether they have.
    """

    columns: tuple[Tensor, ...]
    in_parts: bool


@dataclass(frozen=True)
class _Long:
    """Long rows; see the kernels gather_kv and prefill_attention_dense. `k` and `v` are room for their contexts."""

    slots: Tensor
    packs: tuple[Tensor, ...]
    tiles: tuple[Tensor, ...]
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class _GroupStep:
    """A step as one KV group's layers see it. What there is nothing to do for is None; `pieces` are of so many rows."""

    table: Tensor
    window: int | None
    places: Tensor
    pieces: Tensor | None
    rows: int
    tiles: _Tiles | None
    long: _Long | None


class TritonAttention:
    """An AttentionBackend over a KV cache in a GPU's memory.

    Args:
        kv: The cache.
        heads: Query heads.
        max_rows, max_tokens: The largest step.
        max_length: Of the longest sequence.

    Raises:
        ConfigError: The kernels do not serve this shape of attention.
    """

    def __init__(self, kv: KVView, heads: int, max_rows: int, max_tokens: int, max_length: int) -> None:
        cache = kv.keys[0]
        device, (kv_heads, d), item = cache.device, cache.shape[2:], cache.element_size()
        group = heads // kv_heads
        if d > _WIDEST or heads % kv_heads or group > _LARGEST_GROUP:
            raise ConfigError(
                f"Attention of {heads} query heads and {kv_heads} KV heads, {d} wide, is not supported on a GPU: heads "
                f"may be {_WIDEST} wide, and {_LARGEST_GROUP} query heads share a KV head, at most."
            )
        self._kv = kv
        self._keys_of_tile = keys_of_tile(d, item)
        self._at_once = kv_splits_at_once(kv_heads, device)
        pieces = kv_splits_for(max_rows + 1, self._at_once)  # one for a step's padding
        queries, shape = queries_of_tile(d, item, group, device), tile_shape(d, item, device)
        parts = prefill_split_kv.max_splits(kv_heads, device, shape.at_once)
        self._partials = new_decode_partials(pieces, heads, kv_heads, d, device)
        self._partials_of_parts = new_prefill_partials(parts * queries, heads, d, device)
        self._branch = Branch(device)
        self._pieces = torch.zeros((len(kv.windows), pieces, KV_SPLIT_COLUMNS), dtype=torch.int32, device=device)
        self._places = torch.zeros((len(kv.windows), max(max_rows, max_tokens)), dtype=torch.int64, device=device)
        self._sizes = TileSizes(
            queries,
            parts=parts,
            alone=prefill_split_kv.max_unshared_splits(kv_heads, device),
            keys=shape.keys,
            fewest=prefill_split_kv.FEWEST,
            merge=prefill_split_kv.MERGE,
            shared=prefill_split_kv.SHARED,
            most_of_tile=prefill_split_kv.MAX_SPLITS_OF_TILE,
        )
        if None in kv.windows and prefill_dense.serves_dense_prefill(device, cache.dtype, d):
            self._sizes = dataclasses.replace(
                self._sizes,
                long_tile=prefill_dense.QUERIES,
                long_from=gathered_kv.DENSE_MIN_QUERIES,
                pack=gathered_kv.PACK,
                room=gathered_kv.gathered_tokens(2 * kv_heads * d * item, max_tokens, max_length),
            )
        self._packed = torch.empty((2, self._sizes.room, kv_heads, d), dtype=cache.dtype, device=device)
        self._steps: list[_GroupStep] = []
        self._qk_norm_rope_and_cache = kernel("qk_norm_rope_and_cache", "cuda")
        self._compute_slot_mapping = kernel("compute_slot_mapping", "cuda")
        self._plan_kv_splits = kernel("plan_kv_splits", "cuda")
        self._decode_attention = kernel("decode_attention", "cuda")
        self._prefill_attention = kernel("prefill_attention", "cuda")
        self._prefill_attention_split_kv = kernel("prefill_attention_split_kv", "cuda")
        self._gather_kv = kernel("gather_kv", "cuda")
        self._prefill_attention_dense = kernel("prefill_attention_dense", "cuda")

    def columns(self, counts: Ints, bounds: Ints, room: Room | None = None) -> tuple[Ints, ...]:
        """Rows of one token; tiles, of long rows and then of short ones, or the parts of few tiles; counts and first
        tokens; long rows' tiles and packs. Nothing if all rows have one token. Where there is room for no row of one
        token, it is a tile. With room, its tokens alone decide whether there may be parts.
        """
        sizes, behind = self._sizes, (counts, counts.cumsum() - counts)
        if room is not None:
            assert room.tokens < gathered_kv.DENSE_MIN_QUERIES, (
                "how contexts of long rows are packed depends on their lengths"
            )
            single, rows = tiling.singles_and_tiles_within(room, counts, bounds, sizes.tile)
            if sizes.are_few(room.tokens):
                return *single, *tiling.parts_within(room, rows, counts, bounds, sizes), *behind
            return *single, *rows, *behind
        if (counts == 1).all():
            return ()
        kinds = Kinds.of(counts, bounds, sizes)
        of_long, of_short = (tiling.tiles(counts, bounds, rows, sizes.tile) for rows in (kinds.long, kinds.short))
        single = tiling.singles(counts, kinds)
        if not len(kinds.long):
            few = sizes.are_few(int(counts[kinds.short].sum()))
            return *single, *(tiling.parts(of_short, counts, bounds, sizes) if few else of_short), *behind
        columns = (*single, *tiling.concatenated((of_long, of_short)), *behind)
        of_long_rows = tiling.long_tiles(counts, bounds, kinds, sizes), tiling.packs(counts, bounds, kinds, sizes)
        return columns + of_long_rows[0] + of_long_rows[1]

    def prepare(self, rows: Rows) -> None:
        self._steps = [self._prepare_group(rows, group) for group in range(len(self._kv.windows))]

    def run(self, layer: AttentionLayer, qkv: Tensor, rule: QKNormRope, out: Tensor) -> None:
        keys, values = self._kv.keys[layer.number], self._kv.values[layer.number]
        step = self._steps[self._kv.groups[layer.number]]
        q = torch.empty_like(out)
        self._qk_norm_rope_and_cache(qkv, rule.norm, rule.eps, rule.cos, rule.sin, keys, values, step.places, q)
        mixed = step.pieces is not None and step.tiles is not None
        if step.tiles is not None:
            with self._branch.beside() if mixed else nullcontext():
                self._attend_short(layer, q, keys, values, step, step.tiles, out)
        if step.pieces is not None:
            rows = 0 if mixed else step.rows  # programs that stay would leave tiles no room beside them
            rest = (self._partials, out, layer.scale, layer.cap, rows)
            self._decode_attention(q, keys, values, step.table, step.pieces, *rest)
        if mixed:
            self._branch.join()
        if (long := step.long) is not None:
            self._gather_kv(keys, values, step.table, long.slots, *long.packs, long.k, long.v)
            self._prefill_attention_dense(q, long.k, long.v, *long.tiles, out, layer.scale, layer.cap)

    def _attend_short(
        self,
        layer: AttentionLayer,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        step: _GroupStep,
        tiles: _Tiles,
        out: Tensor,
    ) -> None:
        """Rows of several tokens that are not long."""
        rest = (out, layer.scale, layer.cap)
        columns = (step.table, *tiles.columns, step.window, self._sizes.tile)
        if tiles.in_parts:
            self._prefill_attention_split_kv(q, keys, values, *columns, self._partials_of_parts, *rest)
        else:
            self._prefill_attention(q, keys, values, *columns, *rest)

    def _prepare_group(self, rows: Rows, group: int) -> _GroupStep:
        table, window = rows.tables[group], self._kv.windows[group]
        singles, tiles, long = self._take_apart(rows, window)
        places = self._places[group, : len(rows.positions)]
        self._compute_slot_mapping(table, rows.slot_of_token, rows.positions, self._kv.block_size, places)
        pieces = None
        if singles.number:
            pieces = self._pieces[group, : kv_splits_for(singles.number, self._at_once)]
            cut = (singles.rows, singles.tokens, window, self._keys_of_tile, pieces, self._at_once, FEWEST)
            self._plan_kv_splits(rows.starts, rows.slots, *cut)
        return _GroupStep(table, window, places, pieces, singles.number, tiles, long)

    def _take_apart(self, rows: Rows, window: int | None) -> tuple[_Singles, _Tiles | None, _Long | None]:
        """The step's columns, by what they are for. Long rows are served by tiles where there is a window."""
        if not rows.columns:
            return _Singles(None, None, len(rows.counts)), None, None
        tiles: _Tiles | None = None
        if len(rows.columns) == _COLUMNS_WITH_PARTS:
            single_rows, tokens, *of_part, counts, firsts = rows.columns
            tiles = _Tiles((*of_part, rows.starts, counts, firsts, rows.slots), in_parts=True)
            return _Singles(single_rows, tokens, len(single_rows)), tiles, None
        single_rows, tokens, tile_rows, tile_offsets, counts, firsts, *of_long = rows.columns
        long: _Long | None = None
        kinds, skipped = Kinds.of(rows.counts, rows.bounds, self._sizes), 0
        if window is None and of_long:
            skipped = tiling.number_of_tiles(rows.counts, kinds.long, self._sizes.tile)
            k, v = self._packed[:, : len(of_long[4]) * gathered_kv.PACK].unbind()
            long = _Long(rows.slots, tuple(of_long[4:]), tuple(of_long[:4]), k, v)
        if len(tile_rows) > skipped:
            own = (tile_rows[skipped:], tile_offsets[skipped:])
            tiles = _Tiles((*own, rows.starts, counts, firsts, rows.slots), in_parts=False)
        return _Singles(single_rows, tokens, len(single_rows)), tiles, long
