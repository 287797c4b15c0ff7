"""Hash chains over blocks of tokens: equal hashes mean equal tokens from the very beginning, and equal salts.

sha256, so that nobody can make two prompts meet by choosing tokens. Knows nothing about blocks being held or free.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence


class PrefixHashes:
    """The chain of one sequence; each block is hashed once, however often it is asked for.

    Args:
        block_size: Tokens a block.
        salt: Sequences of different salts share nothing.
    """

    def __init__(self, block_size: int, salt: str = "") -> None:
        self._block_size = block_size
        self._hashes: list[bytes] = []
        self._root = hashlib.sha256(b"quire prefix\0" + salt.encode()).digest()

    def branch(self, length: int) -> PrefixHashes:
        """The chain of another sequence that begins with the same `length` tokens."""
        other = PrefixHashes(self._block_size)
        other._root = self._root
        other._hashes = self._hashes[: length // self._block_size]
        return other

    def upto(self, tokens: Sequence[int], length: int) -> list[bytes]:
        """The chain, hashed at least as far as the full blocks among the first `length` tokens. Not to be changed.

        Args:
            tokens: The sequence; what was hashed before must not have changed.
            length: At most as many tokens as there are.
        """
        for index in range(len(self._hashes), length // self._block_size):
            self._hash(tokens, index)
        return self._hashes

    def each(self, tokens: Sequence[int], length: int) -> Iterator[bytes]:
        """The same one by one, hashed as far as it is read."""
        for index in range(length // self._block_size):
            if index == len(self._hashes):
                self._hash(tokens, index)
            yield self._hashes[index]

    def _hash(self, tokens: Sequence[int], index: int) -> None:
        """The next link of the chain."""
        block = array("q", tokens[index * self._block_size : (index + 1) * self._block_size])
        parent = self._hashes[-1] if self._hashes else self._root
        self._hashes.append(hashlib.sha256(parent + block.tobytes()).digest())
