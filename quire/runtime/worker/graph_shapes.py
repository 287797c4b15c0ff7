"""The shapes of steps that are captured as CUDA graphs, and the choice of the shape that a step is padded to.

A captured step has a fixed number of tokens and rows, and its padding belongs to the dummy slot.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum, auto

from quire.compute.attention.limits import PaddedLimits

_MIDDLE = (160, 192, 256, 320, 384, 432, 512)
"""Tokens of medium steps. cuBLAS takes less time for 256 and 512 rows than for 224 and 448."""
_MAX_TOKENS = _MIDDLE[-1]
"""Maximum tokens of a captured step with prompts. For an 8B model, a GPU computes a larger step more slowly than the
host launches it kernel by kernel."""
_TILE = 128
"""Rows of a tile of cuBLAS's large products."""
_PADDING_ROWS = 2
"""Rows of padding in a step with prompts: one has all padding tokens, and one is empty."""
_PREFILL_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
_PREFILL_ROWS = 8
"""Rows of prefill shapes, without padding."""
_MIXED_ROWS = {64: 64, 128: 128, **dict.fromkeys(_MIDDLE, 128)}
"""Rows of mixed shapes by tokens, without padding. Padding is sampled too, so many rows cost time."""
_WIDE_MIXED_ROWS = {256: 255, 384: 255, 512: 255}
"""Rows of mixed shapes for many sequences, by tokens, without padding. With a padding token they have at most 256 rows
of one token, a power of two, which the kernel that plans KV splits works on."""
_SHORT_TOKENS = (2, 4, 8, 16)
"""Tokens of short shapes. They stay few, because each token reads its sequence's keys as a row of its own."""
_FEW_SAMPLED = 64
"""Number of positions whose logits take no longer than reading the head's weights. With drafts, a row samples
several."""
MAX_SHORT_TOKENS = _SHORT_TOKENS[-1]
MAX_ROWS = max(_WIDE_MIXED_ROWS.values()) + _PADDING_ROWS
"""Maximum rows of a captured step with prompts."""


class ShapeKind(Enum):
    """Kinds of shapes. Steps of one kind launch the same kernels, apart from sizes and the attention kernels for many
    rows."""

    DECODE = auto()
    """Every row has one token and is sampled."""
    PREFILL = auto()
    """Every row has several tokens."""
    MIXED = auto()
    """Some rows have one token, others several."""
    SHORT = auto()
    """Rows have a few tokens, as with drafts. Attention treats each token as a row, so it uses the kernels of decode
    steps, which do not depend on lengths that the host knows."""


class ShortSteps(Enum):
    """Which steps with several tokens per row are captured as short steps. The value is the number of tokens per
    sampled position."""

    NONE = 0
    VERIFYING = 1
    """Steps that verify drafts, where each token is sampled."""
    DRAFTING = 2
    """Steps of a draft model, where a row samples only after its last token."""


@dataclass(frozen=True)
class GraphShape:
    """Sizes of a captured step, with padding. `plan_rows` is the maximum rows of a plan, where 0 means as many as
    `sampled`."""

    kind: ShapeKind
    tokens: int
    rows: int
    sampled: int
    plan_rows: int = 0

    @classmethod
    def decode(cls, rows: int) -> GraphShape:
        return cls(ShapeKind.DECODE, rows, rows, rows)

    @classmethod
    def with_prompts(
        cls, kind: ShapeKind, tokens: int, rows: int, max_seqs: int, max_sampled: int | None = None
    ) -> GraphShape:
        """Make the shape of a step with prompts; `rows` is without padding. `max_seqs` is the engine's number of
        sequences, and `max_sampled` the maximum sampled positions of a step, which is larger with drafts."""
        plan_rows = min(rows, max_seqs)
        sampled = plan_rows
        if max_sampled is not None and max_sampled > max_seqs:
            sampled = min(max(rows, min(tokens, _FEW_SAMPLED)), max_sampled)
        return cls(kind, tokens, rows + _PADDING_ROWS, sampled, 0 if sampled == plan_rows else plan_rows)

    @classmethod
    def short(cls, tokens: int, sampled: int) -> GraphShape:
        """Make a short shape, with one row per token and one row of padding."""
        return cls(ShapeKind.SHORT, tokens, tokens + 1, sampled)

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token, so that the number of rows decides the length of each column."""
        return self.kind is ShapeKind.DECODE

    @property
    def is_short(self) -> bool:
        """Whether attention treats each token as a row."""
        return self.kind is ShapeKind.SHORT

    @property
    def max_rows(self) -> int:
        """Maximum rows of a plan."""
        return self.plan_rows or self.sampled

    @property
    def decode_rows(self) -> int:
        """Maximum rows of one token in a plan."""
        return 0 if self.kind is ShapeKind.PREFILL else self.max_rows

    @property
    def limits(self) -> PaddedLimits | None:
        """What attention is padded to; None for decode and short steps. In a mixed step the row of padding may have one
        token too."""
        if self.is_decode or self.is_short:
            return None
        return PaddedLimits(self.tokens, self.rows, self.decode_rows + (self.kind is ShapeKind.MIXED))

    def holds(self, tokens: int, rows: int, decode_rows: int, sampled: int = 0) -> bool:
        """Whether a step of these sizes, with rows of several tokens, can be padded to this shape."""
        fits = tokens <= self.tokens and rows <= self.max_rows and decode_rows <= self.decode_rows
        return fits and sampled <= self.sampled


class GraphShapes:
    """The shapes that are captured.

    Args:
        most: Maximum tokens of a captured step; 0: none is captured.
        rows, tokens, length: Maximum rows and tokens of a step, and maximum tokens of one row.
        sampled: Maximum sampled positions of a step; None: one per row.
        short: Which short steps are captured.
    """

    def __init__(
        self,
        most: int,
        rows: int,
        tokens: int,
        length: int,
        sampled: int | None = None,
        short: ShortSteps = ShortSteps.NONE,
    ) -> None:
        self._rows = rows
        sizes = [] if short is ShortSteps.NONE else [size for size in _SHORT_TOKENS if size <= min(most, tokens)]
        self._short = [GraphShape.short(size, size // short.value) for size in sizes]
        self._decode = [GraphShape.decode(size) for size in _decode_sizes(min(most, rows))] if most else []
        self._with_prompts = _shapes_with_prompts(min(most, _MAX_TOKENS, tokens, length), rows, sampled)

    def all(self) -> list[GraphShape]:
        """Return all captured shapes, largest first."""
        shapes = self._decode + self._with_prompts + self._short
        return sorted(shapes, key=lambda shape: (shape.tokens, shape.sampled), reverse=True)

    def for_decode(self, rows: int) -> GraphShape | None:
        at = bisect_left(self._decode, rows, key=lambda shape: shape.rows)
        return self._decode[at] if at < len(self._decode) else None

    def for_short(self, tokens: int, rows: int, sampled: int) -> GraphShape | None:
        return next((shape for shape in self._short if shape.holds(tokens, rows, rows, sampled)), None)

    def for_prompts(self, tokens: int, rows: int, decode_rows: int, sampled: int = 0) -> GraphShape | None:
        """Return the smallest shape for a step with prompts, or None. `decode_rows` of its rows have one token."""
        return next((shape for shape in self._with_prompts if shape.holds(tokens, rows, decode_rows, sampled)), None)

    def mixed_sizes(self, most: int) -> list[tuple[int, int]]:
        """Return sizes of mixed steps that are worth filling up, as (tokens, rows), for steps of up to `most` tokens.

        A step with one token more takes longer: it is padded to the next captured shape, or products compute one more
        tile. Tiles are multiples of 128 tokens; up to 512 these are also captured sizes, so they hold for any number of
        rows.
        """
        tiles = dict.fromkeys([*range(_TILE, most, _TILE), most], self._rows)
        captured = {shape.tokens: shape.max_rows for shape in self._with_prompts if shape.kind is ShapeKind.MIXED}
        return sorted((captured | tiles).items())


def _decode_sizes(most: int) -> list[int]:
    """Return row counts up to `most`: dense where padding costs time, sparse where reading the weights dominates."""
    sizes = [1, 2, 4, *range(8, 33, 8), *range(48, 129, 16), *_MIDDLE, *range(_MIDDLE[-1] + 64, most + 64, 64)]
    return sorted({min(size, most) for size in sizes})


def _shapes_with_prompts(most: int, rows: int, sampled: int | None) -> list[GraphShape]:
    """Return prefill and mixed shapes of up to `most` tokens for an engine of `rows` sequences, smallest first.

    Up to about 64 tokens a step takes as long as reading the weights. Above, sizes are spaced so that padding costs the
    GPU about as much time as a launch without a graph. Prefill shapes are smaller, and need no kernels for rows of one
    token. Shapes of many rows are sparser, because with so many sequences enough prompts wait to fill a step.
    """
    mixed = [*_MIXED_ROWS.items()]
    if rows > max(_MIXED_ROWS.values()):
        mixed += _WIDE_MIXED_ROWS.items()
    sizes = [(ShapeKind.PREFILL, tokens, _PREFILL_ROWS) for tokens in _PREFILL_TOKENS]
    sizes += [(ShapeKind.MIXED, tokens, its_rows) for tokens, its_rows in mixed]
    shapes = [
        GraphShape.with_prompts(kind, tokens, own, rows, sampled) for kind, tokens, own in sizes if tokens <= most
    ]
    return sorted(shapes, key=lambda shape: (shape.tokens, shape.sampled, shape.decode_rows))
