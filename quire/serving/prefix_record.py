"""Which replica was lately sent which prefix: an approximation of what their prefix caches hold.

Blocks are named by hash chains, so a block's name says what is before it. Knows nothing about load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixRecord:
    """The blocks that each replica was sent last, as many as its cache holds; the longest unused are forgotten first.

    Args:
        num_replicas: How many there are.
    """

    def __init__(self, num_replicas: int) -> None:
        self._holders: dict[bytes, int] = {}  # block → replicas that have it, as bits
        self._blocks = [OrderedDict[bytes, None]() for _ in range(num_replicas)]

    def add_replica(self) -> None:
        """Another one, with nothing in its cache; its number is the next."""
        self._blocks.append(OrderedDict())

    def matches(self, blocks: Sequence[bytes]) -> list[int]:
        """How many of a prompt's first blocks each replica was sent."""
        found = [0] * len(self._blocks)
        having = (1 << len(self._blocks)) - 1
        for index, block in enumerate(blocks):
            remaining = having & self._holders.get(block, 0)
            if remaining != having:
                _set(found, having & ~remaining, index)
                having = remaining
            if not having:
                return found
        _set(found, having, len(blocks))
        return found

    def add(self, replica: int, blocks: Sequence[bytes], capacity: int) -> None:
        """A replica gets a prompt; its cache holds `capacity` blocks."""
        held, bit = self._blocks[replica], 1 << replica
        # As engines free them: the beginning, which all that follows needs, stays longest.
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
            self._holders[block] = self._holders.get(block, 0) | bit
        while len(held) > capacity:
            self._forget(held.popitem(last=False)[0], bit)

    def clear(self, replica: int) -> None:
        """Its cache is empty."""
        for block in self._blocks[replica]:
            self._forget(block, 1 << replica)
        self._blocks[replica].clear()

    def __len__(self) -> int:
        return len(self._holders)

    def _forget(self, block: bytes, bit: int) -> None:
        left = self._holders[block] & ~bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


def _set(found: list[int], replicas: int, value: int) -> None:
    """Of the replicas whose bits are set."""
    while replicas:
        lowest = replicas & -replicas
        found[lowest.bit_length() - 1] = value
        replicas ^= lowest
