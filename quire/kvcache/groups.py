"""KV groups as the host sees them: how far back a group's layers look, and how many blocks that takes.

Every block of the pool can serve every group, since groups have the same number of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupReach:
    """How far back the layers of a KV group look.

    Attributes:
        window: A token sees itself and the `window - 1` tokens before it; None sees all.
    """

    window: int | None = None

    def first_needed(self, position: int) -> int:
        """The first position that tokens from `position` on still see."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def most_blocks(self, length: int, chunk: int, block_size: int) -> int:
        """Blocks held at once by a sequence of `length` tokens that moves by at most `chunk`."""
        blocks = -(-length // block_size)
        if self.window is None:
            return blocks
        return min(blocks, -(-(self.window + chunk) // block_size) + 1)


FULL = (GroupReach(),)


def blocks_of(groups: Sequence[GroupReach], length: int, chunk: int, block_size: int) -> int:
    """Blocks of all groups that a sequence of `length` tokens holds at once, if it moves by at most `chunk`."""
    return sum(group.most_blocks(length, chunk, block_size) for group in groups)


def capacity(groups: Sequence[GroupReach], num_blocks: int, block_size: int, chunk: int, longest: int) -> int:
    """The longest sequence, up to `longest`, that fits into the pool with all of it to itself."""
    low, high = 0, longest
    while low < high:
        length = (low + high + 1) // 2
        if blocks_of(groups, length, chunk, block_size) <= num_blocks:
            low = length
        else:
            high = length - 1
    return low


def tokens_held(groups: Sequence[GroupReach], num_blocks: int, block_size: int, chunk: int, length: int) -> int:
    """Tokens that the pool holds in sequences of `length`, which move by at most `chunk`; a token stands in a block of
    each group, but a group that does not look back so far has given back what it left behind.
    """
    return num_blocks * -(-length // block_size) * block_size // blocks_of(groups, length, chunk, block_size)
