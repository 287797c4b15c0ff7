"""GraphShapes of steps that are recorded, and which one a step is padded to.

A recorded step has one number of tokens and of rows; what it has too few of belongs to the dummy slot. Knows nothing
about graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from quire.attention.backend import PaddedLimits

_MIDDLE = (160, 192, 256, 320, 384, 432, 512)
"""Tokens between few and many. cuBLAS takes less time for 256 and 512 rows than for 224 and 448."""
_MOST_TOKENS = _MIDDLE[-1]
"""Of a recorded step with prompts in it: with more, a device takes longer for a model of 8B than a host takes to launch
it kernel by kernel."""
_TILE = 128
"""Rows that cuBLAS's products compute at a time where they are many."""
_PADDING_ROWS = 2
"""Of a step with prompts in it: one for the tokens that are too many, and one without any."""
_ALONE = (16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Tokens of prompts by themselves …"""
_FEW = 8
"""… and their rows."""
_MIXED = {64: 64, 128: 128, **dict.fromkeys(_MIDDLE, 128)}
"""Tokens of prompts beside sequences that draw, and rows of both. Each row costs its read, so …"""
_WIDE = {256: 255, 384: 255, 512: 255}
"""… there are others for more. That and the padding's make 256 single tokens: what cuts contexts takes a power of 2."""
MOST_ROWS = max(_WIDE.values()) + _PADDING_ROWS
"""Of a recorded step with prompts in it."""


@dataclass(frozen=True)
class GraphShape:
    """What a recorded step has, padding included.

    Attributes:
        tokens: Its tokens.
        rows: Its rows.
        reads: Of these, so many are read; no more of them are a plan's.
        singles: A plan's rows of one token, at most.
    """

    tokens: int
    rows: int
    reads: int
    singles: int

    @classmethod
    def of_decode(cls, rows: int) -> GraphShape:
        """All rows have one token and are read."""
        return cls(rows, rows, rows, rows)

    @classmethod
    def of_prompts(cls, tokens: int, most: int, rows: int, *, singles: bool) -> GraphShape:
        """So many rows at most, and no more than the engine's `rows`, each of any number of tokens; of at least two
        unless there are `singles`."""
        assert tokens != most + _PADDING_ROWS, "as many rows as tokens are taken for a decode step"
        return cls(tokens, most + _PADDING_ROWS, min(rows, most), min(rows, most) if singles else 0)

    @property
    def is_decode(self) -> bool:
        """Whether all rows have one token. Then columns are equally long by themselves, and all padding alike."""
        return self.rows == self.tokens

    @property
    def kind(self) -> tuple[bool, bool]:
        """Steps of one kind launch the same, but for sizes and what attends to many rows."""
        return self.is_decode, self.singles > 0

    @property
    def room(self) -> PaddedLimits | None:
        """What attention needs room for. A last token of padding is a row of one token where there may be such."""
        return None if self.is_decode else PaddedLimits(self.tokens, self.rows, self.singles and self.singles + 1)

    def holds(self, tokens: int, rows: int, singles: int) -> bool:
        """Whether a step of so many can be padded to this; it has prompts in it."""
        return tokens <= self.tokens and rows <= self.reads and singles <= self.singles


class GraphShapes:
    """Those that are recorded.

    Args:
        most: Tokens of the largest recorded step.
        rows, tokens, length: Of the largest step: its rows, its tokens, and the tokens of one of its rows.
    """

    def __init__(self, most: int, rows: int, tokens: int, length: int) -> None:
        self._rows = rows
        self._decode = [GraphShape.of_decode(size) for size in decode_sizes(min(most, rows))] if most else []
        self._prompts = prompt_shapes(min(most, _MOST_TOKENS, tokens, length), rows)

    def all(self) -> list[GraphShape]:
        """The largest first."""
        return sorted(self._decode + self._prompts, key=lambda shape: (shape.tokens, shape.reads), reverse=True)

    def of_decode(self, rows: int) -> GraphShape | None:
        """The smallest of a step in which so many rows have one token and are read."""
        at = bisect_left(self._decode, rows, key=lambda shape: shape.rows)
        return self._decode[at] if at < len(self._decode) else None

    def of_prompts(self, tokens: int, rows: int, singles: int) -> GraphShape | None:
        """The smallest of any other step."""
        return next((shape for shape in self._prompts if shape.holds(tokens, rows, singles)), None)

    def mixed_sizes(self, most: int) -> list[tuple[int, int]]:
        """Numbers of tokens, of up to `most`, from which on a step with prompts beside rows of one token takes longer,
        and rows up to which it does: it is padded to the next, and where none is recorded, products compute whole
        tiles. These are recorded sizes too, so they hold for any number of rows."""
        tiles = dict.fromkeys([*range(_TILE, most, _TILE), most], self._rows)
        recorded = {shape.tokens: shape.reads for shape in self._prompts if shape.singles}
        return sorted((recorded | tiles).items())


def decode_sizes(max_rows: int) -> list[int]:
    """Numbers of rows: close together where rows are cheap to pad but weights are read anyway."""
    sizes = [1, 2, 4, *range(8, 33, 8), *range(48, 129, 16), *_MIDDLE, *range(_MIDDLE[-1] + 64, max_rows + 64, 64)]
    return sorted({min(size, max_rows) for size in sizes})


def prompt_shapes(most: int, rows: int) -> list[GraphShape]:
    """Of steps with prompts in them, of `most` tokens; the smallest first.

    Weights are read whatever the number of tokens up to some 64; from there on sizes are as far apart as a host takes
    longer to launch a step than a device to compute so many tokens. Prompts alone have smaller ones, and ask for
    nothing that only rows of one token need; they do with some steps that have room for these. Many rows have sizes
    farther apart: beside so many, more prompts wait, and fill a step up.
    """
    shapes = [GraphShape.of_prompts(size, _FEW, rows, singles=False) for size in _ALONE]
    shapes += [GraphShape.of_prompts(size, most, rows, singles=True) for size, most in _MIXED.items()]
    if rows > max(_MIXED.values()):
        shapes += [GraphShape.of_prompts(size, most, rows, singles=True) for size, most in _WIDE.items()]
    fitting = [shape for shape in shapes if shape.tokens <= most]
    return sorted(fitting, key=lambda shape: (shape.tokens, shape.reads, shape.singles))
