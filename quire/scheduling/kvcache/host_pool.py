"""The pool of host blocks that preempted sequences are swapped to. A host block has one holder, so none is counted."""

from __future__ import annotations

from collections.abc import Iterable


class HostPool:
    """Hands out host blocks 0..num_blocks - 1 as few runs of consecutive numbers: a worker copies a run at once.

    Attributes:
        num_blocks: Blocks that the worker has ready, free or not.
    """

    def __init__(self, num_blocks: int = 0) -> None:
        self.num_blocks = 0
        self._free: list[range] = []  # runs, the lowest first; no two of them touch
        self.grow(num_blocks)

    @property
    def num_free(self) -> int:
        """Number of host blocks that nobody holds."""
        return sum(map(len, self._free))

    def grow(self, num_blocks: int) -> None:
        """Take in that blocks 0..num_blocks - 1 are ready. Nothing changes if that many were ready before."""
        if num_blocks > self.num_blocks:
            added = range(self.num_blocks, num_blocks)
            if self._free and self._free[-1].stop == added.start:
                added = range(self._free.pop().start, num_blocks)
            self._free.append(added)
            self.num_blocks = num_blocks

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` host blocks, of which as many must be free: from the smallest run that has them all, or else
        from the largest runs."""
        assert count <= self.num_free
        allocated: list[int] = []
        while left := count - len(allocated):
            enough = [run for run in self._free if len(run) >= left]
            run = min(enough, key=len) if enough else max(self._free, key=len)
            allocated += run[:left]
            at = self._free.index(run)
            self._free[at : at + 1] = [run[left:]] if len(run) > left else []
        return allocated

    def free(self, blocks: Iterable[int]) -> None:
        """Free host blocks, whose contents are not needed any more."""
        free: list[range] = []
        for run in sorted([*self._free, *(range(block, block + 1) for block in blocks)], key=lambda run: run.start):
            if free and run.start <= free[-1].stop:
                assert run.start == free[-1].stop, "host blocks are freed twice"
                run = range(free.pop().start, run.stop)
            free.append(run)
        self._free = free
