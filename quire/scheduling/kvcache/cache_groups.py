"""KV cache groups: layers that share a block table, how far back they look, what they cache, and what that takes.

Blocks that a group no longer sees are freed by the table (`BlockTable.free_out_of_window`).

All groups of a model have blocks of equally many bytes, so every block of the pool can serve every group. A group's
layers divide a block into equal parts (`block_parts`); with layers that cache half as much, it has twice as many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Full:
    """A token sees itself and all tokens before it."""

    length: ClassVar[None] = None

    def first_visible(self, position: int) -> int:
        """Return the first position that tokens from `position` on still see."""
        return 0


@dataclass(frozen=True)
class Window:
    """A token sees itself and the `length - 1` tokens before it."""

    length: int

    def first_visible(self, position: int) -> int:
        """Return the first position that tokens from `position` on still see."""
        return max(0, position - self.length + 1)


@dataclass(frozen=True)
class Chunk:
    """Positions are divided into chunks of `length`, and a token sees the tokens of its own chunk up to itself."""

    length: int

    def first_visible(self, position: int) -> int:
        """Return the first position that tokens from `position` on still see."""
        return position // self.length * self.length


Reach = Full | Window | Chunk
"""How far back tokens look. `length` is how many tokens one sees at most, itself included; None: there is no limit."""
FULL = Full()


@dataclass(frozen=True)
class Plane:
    """One of the tensors that a layer caches, such as its keys.

    Attributes:
        name: What it holds.
        shape: The shape of one token's entry, or of one sequence's state.
        element: The type of a state's elements, by torch's name; empty: the KV cache's type, or for states the model's.
    """

    name: str
    shape: tuple[int, ...]
    element: str = ""

    @property
    def elements(self) -> int:
        """Number of elements of one token, or of one sequence."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class CacheForm:
    """What a layer caches of each token; all planes have elements of the KV cache's type."""

    planes: tuple[Plane, ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements of one token, in all planes."""
        return sum(plane.elements for plane in self.planes)


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share one block table.

    Attributes:
        layers: Their numbers. Only models look at them.
        reach: How far back their tokens look.
        form: What each of them caches of a token.
    """

    layers: tuple[int, ...] = ()
    reach: Reach = FULL
    form: CacheForm = CacheForm()

    def max_blocks(self, length: int, chunk: int, block_size: int) -> int:
        """Return how many blocks a sequence of `length` tokens holds at most, if a step computes up to `chunk`
        tokens."""
        blocks = -(-length // block_size)
        if self.reach.length is None:
            return blocks
        return min(blocks, -(-(self.reach.length + chunk) // block_size) + 1)


def block_elements(groups: Sequence[CacheGroup]) -> int:
    """Return the number of elements that a block has for each of its tokens: as many as the largest group needs, and a
    multiple of what any layer caches. Groups without layers need none."""
    sizes = [group.form.elements for group in groups if group.layers]
    unit = math.lcm(*sizes)
    largest = max((len(group.layers) * group.form.elements for group in groups), default=0)
    return -(-largest // unit) * unit


def block_parts(groups: Sequence[CacheGroup]) -> tuple[int, ...]:
    """Return for each group into how many parts its layers divide a block; parts that no layer uses are padding."""
    elements = block_elements(groups)
    return tuple(elements // group.form.elements if group.layers else 1 for group in groups)


def block_entries(groups: Sequence[CacheGroup]) -> tuple[int, ...]:
    """Return for each group how many entries of its layers' planes a block has: one if all layers cache alike, since
    each has planes of its own then; otherwise one for each part of a block, of which a layer uses one."""
    alike = len({group.form for group in groups if group.layers}) < 2
    return (1,) * len(groups) if alike else block_parts(groups)


FULL_ATTENTION = (CacheGroup(),)
"""The only group of a model whose layers all see everything."""


def blocks_per_sequence(groups: Sequence[CacheGroup], length: int, chunk: int, block_size: int) -> int:
    """Return how many blocks of all groups a sequence of `length` tokens holds at most, if a step computes up to
    `chunk` tokens."""
    return sum(group.max_blocks(length, chunk, block_size) for group in groups)


def capacity(groups: Sequence[CacheGroup], num_blocks: int, block_size: int, chunk: int, longest: int) -> int:
    """Return the length of the longest sequence, up to `longest`, that fits into an empty pool."""
    return largest_fitting(lambda each: blocks_per_sequence(groups, each, chunk, block_size) <= num_blocks, longest)


def largest_fitting(fits: Callable[[int], bool], limit: int) -> int:
    """Find the largest number up to `limit` that fits, by bisection; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def max_cached_tokens(groups: Sequence[CacheGroup], num_blocks: int, block_size: int, chunk: int, length: int) -> int:
    """Return how many tokens the pool holds in sequences of `length` tokens, if a step computes up to `chunk` of each.

    Groups with a window or chunks free the blocks that they no longer see, so with them the pool holds more than
    `num_blocks * block_size / len(groups)` tokens. Without groups there is no limit, and one sequence is returned.
    """
    blocks = blocks_per_sequence(groups, length, chunk, block_size)
    if not blocks:
        return length
    return num_blocks * -(-length // block_size) * block_size // blocks
