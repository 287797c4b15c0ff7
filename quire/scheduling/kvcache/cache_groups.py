"""KV cache groups: layers that share a block table, how far back they look, and how many blocks that takes.

All groups of a model have the same number of layers, so every block of the pool can serve every group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share one block table.

    Attributes:
        layers: Their numbers. Only models look at them.
        window: A token sees itself and the `window - 1` tokens before it; None: as `chunk` says.
        chunk: A token sees the tokens of its own chunk of this length up to itself; None: all before it.
    """

    layers: tuple[int, ...] = ()
    window: int | None = None
    chunk: int | None = None

    @property
    def reach(self) -> int | None:
        """Return how many tokens a token sees at most, itself included; None: all before it."""
        return self.window if self.chunk is None else self.chunk

    def first_visible(self, position: int) -> int:
        """Return the first position that tokens from `position` on still see."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(0, position - self.window + 1)

    def max_blocks(self, length: int, chunk: int, block_size: int) -> int:
        """Return how many blocks a sequence of `length` tokens holds at most, if a step computes up to `chunk`
        tokens."""
        blocks = -(-length // block_size)
        if self.reach is None:
            return blocks
        return min(blocks, -(-(self.reach + chunk) // block_size) + 1)


FULL_ATTENTION = (KVCacheGroup(),)
"""The only group of a model whose layers all see everything."""


def blocks_per_sequence(groups: Sequence[KVCacheGroup], length: int, chunk: int, block_size: int) -> int:
    """Return how many blocks of all groups a sequence of `length` tokens holds at most, if a step computes up to
    `chunk` tokens."""
    return sum(group.max_blocks(length, chunk, block_size) for group in groups)


def capacity(groups: Sequence[KVCacheGroup], num_blocks: int, block_size: int, chunk: int, longest: int) -> int:
    """Return the length of the longest sequence, up to `longest`, that fits into an empty pool."""
    return largest_fitting(lambda each: blocks_per_sequence(groups, each, chunk, block_size) <= num_blocks, longest)


def largest_fitting(fits: Callable[[int], bool], limit: int) -> int:
    """Find the largest number up to `limit` that fits, by bisection; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def max_cached_tokens(groups: Sequence[KVCacheGroup], num_blocks: int, block_size: int, chunk: int, length: int) -> int:
    """Return how many tokens the pool holds in sequences of `length` tokens, if a step computes up to `chunk` of each.

    Groups with a window or chunks free the blocks that they no longer see, so with them the pool holds more than
    `num_blocks * block_size / len(groups)` tokens.
    """
    blocks = blocks_per_sequence(groups, length, chunk, block_size)
    return num_blocks * -(-length // block_size) * block_size // blocks
