"""Shapes of the steps that are captured as CUDA graphs, and the shape that a step is padded to.

A captured step has one number of tokens and of rows; its padding belongs to the dummy slot. Knows nothing about graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum, auto

from quire.compute.attention.limits import PaddedLimits

_MIDDLE = (160, 192, 256, 320, 384, 432, 512)
"""Tokens of steps between small and large. cuBLAS takes less time for 256 and 512 rows than for 224 and 448."""
_MAX_TOKENS = _MIDDLE[-1]
"""Tokens of a captured step with prompts, at most: a larger step of an 8B model takes the GPU longer than the host
takes to launch it kernel by kernel."""
_TILE = 128
"""Rows of a tile of cuBLAS's products where there are many rows."""
_PADDING_ROWS = 2
"""Rows that a step with prompts is padded with: one has all tokens of padding, one has none."""
_PREFILL_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Tokens of prefill shapes."""
_PREFILL_ROWS = 8
"""Rows of prefill shapes, without padding."""
_MIXED_ROWS = {64: 64, 128: 128, **dict.fromkeys(_MIDDLE, 128)}
"""Rows of mixed shapes by their tokens, without padding. Every row is sampled, padding too, so many rows cost time."""
_WIDE_MIXED_ROWS = {256: 255, 384: 255, 512: 255}
"""Rows of mixed shapes for more sequences, by their tokens, without padding. With a token of padding they have 256 rows
of one token at most, a power of two, as the kernel that plans KV splits works on."""
_SHORT_TOKENS = (2, 4, 8, 16)
"""Tokens of short shapes. As rows of their own, tokens of one sequence read its keys each for itself."""
_FEW_SAMPLED = 64
"""Positions whose logits take no longer than reading the head's weights. With drafts, a row samples several."""
MAX_SHORT_TOKENS = _SHORT_TOKENS[-1]
"""Tokens of a short step, at most."""
MAX_ROWS = max(_WIDE_MIXED_ROWS.values()) + _PADDING_ROWS
"""Rows of a captured step with prompts, at most."""


class ShapeKind(Enum):
    """Steps whose shapes are of one kind launch the same kernels, but for sizes and what attends to many rows."""

    DECODE = auto()
    """Every row has one token, and all are sampled."""
    PREFILL = auto()
    """Every row has several tokens."""
    MIXED = auto()
    """Some rows have one token, others several."""
    SHORT = auto()
    """Rows of a few tokens, as with drafts. Attention takes each token for a row, so its kernels are those of decode
    steps, and nothing depends on what the host knows of lengths."""


class ShortSteps(Enum):
    """Which steps with rows of several tokens are captured as short ones. The value is how many of their tokens there
    are for each sampled position."""

    NONE = 0
    VERIFYING = 1
    """Steps of a model that verifies drafts: each token is sampled."""
    DRAFTING = 2
    """Steps of a draft model: a row of several tokens samples one, behind its last."""


@dataclass(frozen=True)
class GraphShape:
    """Sizes of a captured step, padding included.

    Attributes:
        kind: What rows it may have.
        tokens: Number of tokens.
        rows: Number of rows.
        sampled: Number of sampled positions.
        plan_rows: Rows that a plan may have; 0: as many as sampled positions.
    """

    kind: ShapeKind
    tokens: int
    rows: int
    sampled: int
    plan_rows: int = 0

    @classmethod
    def decode(cls, rows: int) -> GraphShape:
        """The shape of a decode step of this many rows."""
        return cls(ShapeKind.DECODE, rows, rows, rows)

    @classmethod
    def with_prompts(
        cls, kind: ShapeKind, tokens: int, rows: int, max_seqs: int, max_sampled: int | None = None
    ) -> GraphShape:
        """The shape of a step with prompts, of this many tokens and of this many rows before padding. The engine runs
        `max_seqs` sequences. A step samples up to `max_sampled` positions: as many, or with drafts more."""
        plan_rows = min(rows, max_seqs)
        sampled = plan_rows
        if max_sampled is not None and max_sampled > max_seqs:
            sampled = min(max(rows, min(tokens, _FEW_SAMPLED)), max_sampled)
        return cls(kind, tokens, rows + _PADDING_ROWS, sampled, 0 if sampled == plan_rows else plan_rows)

    @classmethod
    def short(cls, tokens: int, sampled: int) -> GraphShape:
        """The shape of a short step of this many tokens and sampled positions. It has a row for each token and one of
        padding."""
        return cls(ShapeKind.SHORT, tokens, tokens + 1, sampled)

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token. Then the number of rows decides how long each column is."""
        return self.kind is ShapeKind.DECODE

    @property
    def is_short(self) -> bool:
        """Whether each token is a row to attention."""
        return self.kind is ShapeKind.SHORT

    @property
    def max_rows(self) -> int:
        """Rows that a plan may have."""
        return self.plan_rows or self.sampled

    @property
    def decode_rows(self) -> int:
        """Rows of one token that a plan may have."""
        return 0 if self.kind is ShapeKind.PREFILL else self.max_rows

    @property
    def limits(self) -> PaddedLimits | None:
        """What attention is padded to. In a mixed step, the row of padding may have one token as well."""
        if self.is_decode or self.is_short:
            return None
        return PaddedLimits(self.tokens, self.rows, self.decode_rows + (self.kind is ShapeKind.MIXED))

    def holds(self, tokens: int, rows: int, decode_rows: int, sampled: int = 0) -> bool:
        """Whether a step with rows of several tokens, of these sizes, can be padded to this shape."""
        fits = tokens <= self.tokens and rows <= self.max_rows and decode_rows <= self.decode_rows
        return fits and sampled <= self.sampled


class GraphShapes:
    """The shapes that are captured.

    Args:
        most: Tokens of the largest captured step; 0: none is captured.
        rows, tokens, length: Limits of a step: its rows, its tokens, and the tokens of one of its rows.
        sampled: Limit of a step's sampled positions; None: one a row.
        short: Which short steps there are.
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
        """All captured shapes, the largest first."""
        shapes = self._decode + self._with_prompts + self._short
        return sorted(shapes, key=lambda shape: (shape.tokens, shape.sampled), reverse=True)

    def for_step(self, tokens: int, rows: int, sampled: int, decode_rows: int) -> GraphShape | None:
        """The smallest shape for a step of these sizes; `decode_rows` of its rows have one token."""
        if tokens == rows == sampled:
            return self.for_decode(rows)
        return self.for_prompts(tokens, rows, decode_rows, sampled)

    def for_decode(self, rows: int) -> GraphShape | None:
        """The smallest shape for a decode step of so many rows."""
        at = bisect_left(self._decode, rows, key=lambda shape: shape.rows)
        return self._decode[at] if at < len(self._decode) else None

    def for_short(self, tokens: int, rows: int, sampled: int) -> GraphShape | None:
        """The smallest shape for a short step."""
        return next((shape for shape in self._short if shape.holds(tokens, rows, rows, sampled)), None)

    def for_prompts(self, tokens: int, rows: int, decode_rows: int, sampled: int = 0) -> GraphShape | None:
        """The smallest shape for any other step; `decode_rows` of its rows have one token."""
        return next((shape for shape in self._with_prompts if shape.holds(tokens, rows, decode_rows, sampled)), None)

    def mixed_sizes(self, most: int) -> list[tuple[int, int]]:
        """Sizes of mixed steps that are worth filling up, as (tokens, rows), for steps of up to `most` tokens.

        A step of fewer rows that has one token more than such a size takes longer: it is padded to the next captured
        shape, or, where none is captured, products compute one tile more. These tiles are multiples of 128 tokens, all
        of which are captured sizes too up to 512, so they hold for any number of rows.
        """
        tiles = dict.fromkeys([*range(_TILE, most, _TILE), most], self._rows)
        captured = {shape.tokens: shape.max_rows for shape in self._with_prompts if shape.kind is ShapeKind.MIXED}
        return sorted((captured | tiles).items())


def _decode_sizes(most: int) -> list[int]:
    """Numbers of rows up to `most`: close together where padding costs time, and wide apart where weights are read
    anyway.
    """
    sizes = [1, 2, 4, *range(8, 33, 8), *range(48, 129, 16), *_MIDDLE, *range(_MIDDLE[-1] + 64, most + 64, 64)]
    return sorted({min(size, most) for size in sizes})


def _shapes_with_prompts(most: int, rows: int, sampled: int | None) -> list[GraphShape]:
    """Prefill and mixed shapes of up to `most` tokens, for an engine of `rows` sequences; the smallest first.

    Up to some 64 tokens a step takes as long as reading the weights. Above, two sizes are as far apart as the GPU
    computes in the time that a launch without a graph would take longer. Prefill shapes are smaller and spare the
    kernels that only rows of one token need. Shapes of many rows are farther apart: beside so many sequences more
    prompts wait, and fill a step up.
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
