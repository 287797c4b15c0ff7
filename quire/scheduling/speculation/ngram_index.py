"""Prompt lookup: what followed the last tokens when they stood together before (Saxena 2023, "Prompt Lookup Decoding").

Knows one sequence, and nothing about slots, plans or devices.
"""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """A sequence's tokens, and where each run of them ended last.

    Appending a token and looking up the last ones take the same time however long the sequence is. What it begins with
    is read as `catch_up` says, so that a long prompt holds nobody up. Runs of `longest` to `shortest` tokens are looked
    for, longer ones first.

    Attributes:
        tokens: All tokens of the sequence.
    """

    def __init__(self, tokens: Sequence[int], longest: int, shortest: int) -> None:
        assert 1 <= shortest <= longest
        self.tokens = list(tokens)
        self._sizes = range(longest, shortest - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}  # by run: the length of the text that last ended with it
        self._read = 0  # runs that end in the first so many tokens are known

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence."""
        self.tokens += tokens

    def catch_up(self, most: int) -> int:
        """Read up to `most` tokens that were not read yet, all but the last one, so that a run does not find itself.
        Returns how many were read."""
        ends, tokens = self._ends, self.tokens
        begin, end = self._read, min(self._read + most, len(tokens) - 1)
        for length in range(begin + 1, end + 1):
            for size in self._sizes:
                if size <= length:
                    ends[tuple(tokens[length - size : length])] = length
        self._read = max(begin, end)
        return self._read - begin

    def propose(self, most: int) -> list[int]:
        """Propose up to `most` tokens: those that followed the longest run that the text ends with, where it stood
        last. None if no run stood there before. Where the text is over, it is taken to repeat itself."""
        tokens, length = self.tokens, len(self.tokens)
        for size in self._sizes:
            end = self._ends.get(tuple(tokens[length - size :])) if size < length else None
            if end is not None:
                found = tokens[end : end + most]
                while len(found) < most:  # the text's end has met the run itself: it goes round
                    found.append(found[len(found) - (length - end)])
                return found
        return []

    def close(self) -> None:
        """Do nothing: no other sequence looks into this text."""
