"""The host pool: which host blocks hold what preempted sequences left. One holder each, so nothing is counted."""

from __future__ import annotations

from collections.abc import Iterable


class HostPool:
    """Hands out host blocks 0..num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Host blocks that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` host blocks; there must be as many."""
        assert count <= len(self._free)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        """They hold nothing of value any more."""
        self._free.extend(blocks)
        assert len(self._free) <= self.num_blocks, "host blocks are given back twice"
