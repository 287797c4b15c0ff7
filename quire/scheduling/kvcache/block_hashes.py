"""Hash chains over blocks of tokens: equal hashes mean equal tokens from the very beginning, equal images in their
places, equal salts, and keys and values by the same adapter.

sha256, so that nobody can make two prompts meet by choosing tokens. Knows nothing about the pool.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256

from quire.foundation.messages.to_engine import MediaSpan

_ID_BYTES = 8
"""Bytes of a token id as it is hashed."""


class BlockHashes:
    """The block hashes of one sequence; each block is hashed once.

    Args:
        block_size: Tokens per block.
        salt: Sequences of different salts share nothing.
        head: The first tokens as int64 bytes, as far as the caller has them: converting ids to bytes takes half as long
            as hashing them. Kept until more tokens are hashed.
        adapter: The digest of the adapter that keys and values are computed with; empty: the base model alone.
        media: The images that stand among the tokens. A block with a part of one is hashed with its digest.
        source: The digest of what an encoder reads, which all tokens see; empty: there is none.
    """

    def __init__(
        self,
        block_size: int,
        salt: str = "",
        head: bytes = b"",
        adapter: str = "",
        media: Sequence[MediaSpan] = (),
        source: bytes = b"",
    ) -> None:
        self._block_size = block_size
        self._head = head
        self._adapter = adapter
        self._media = media
        self._source = source
        self._hashes: list[bytes] = []
        beginning = f"quire prefix of {adapter}\0" if adapter else "quire prefix\0"  # no salt makes one the other
        self._root = sha256(beginning.encode() + salt.encode()).digest()
        if source:
            self._root = sha256(self._root + b"source" + source).digest()
        self._trunk: BlockHashes | None = None
        self._shared = 0  # blocks that are hashed by the trunk

    @property
    def hashed(self) -> Sequence[bytes]:
        """The hashes that were asked for so far, so all under which blocks of the sequence may be cached."""
        return self._hashes

    def salted(self, salt: str) -> BlockHashes:
        """The chain of the same sequence under another salt, from the beginning."""
        return BlockHashes(self._block_size, salt, self._head, self._adapter, self._media, self._source)

    def branch(self, length: int) -> BlockHashes:
        """The hashes of another sequence that begins with the same `length` tokens, which are hashed once for both."""
        other = BlockHashes(self._block_size, head=self._head[: length * _ID_BYTES], media=self._media)
        other._root, other._adapter, other._source = self._root, self._adapter, self._source
        other._trunk, other._shared = self, length // self._block_size
        return other

    def hash_up_to(self, tokens: Sequence[int], length: int) -> list[bytes]:
        """The chain, hashed at least as far as the full blocks among the first `length` tokens. Do not change it.

        Args:
            tokens: The sequence; what was hashed before must not have changed.
            length: At most as many tokens as there are.
        """
        self._hash_missing_blocks(tokens, length // self._block_size)
        return self._hashes

    def iter_hashes(self, tokens: Sequence[int], length: int) -> Iterator[bytes]:
        """Iterate over the hashes of the full blocks among the first `length` tokens. Blocks are hashed in runs that
        double in length, so little more is hashed than what is read."""
        count, hashes, index = length // self._block_size, self._hashes, 0
        while index < count:
            if index == len(hashes):
                self._hash_missing_blocks(tokens, min(count, 2 * index + 1))
            end = min(count, len(hashes))
            yield from hashes[index:end]
            index = end

    def _hash_missing_blocks(self, tokens: Sequence[int], count: int) -> None:
        """Hash the blocks that are missing among the first `count`."""
        hashes, step = self._hashes, self._block_size * _ID_BYTES
        if self._trunk is not None:
            shared = min(count, self._shared)
            hashes += self._trunk.hash_up_to(tokens, shared * self._block_size)[len(hashes) : shared]
            if len(hashes) >= self._shared:
                self._trunk = None
        contents, first = self._head, len(hashes) * step
        if count * step > len(contents):
            contents, first = array("q", tokens[len(hashes) * self._block_size : count * self._block_size]).tobytes(), 0
            self._head = b""  # what is hashed stays so
        link = hashes[-1] if hashes else self._root
        for begin in range(first, first + (count - len(hashes)) * step, step):
            link = sha256(link + contents[begin : begin + step]).digest()
            if self._media:
                link = self._with_media(link, len(hashes))
            hashes.append(link)

    def _with_media(self, link: bytes, block: int) -> bytes:
        """Return the hash of a block of this number, with the images that it has parts of, and which parts."""
        start = block * self._block_size
        for span in self._media:
            if span.start < start + self._block_size and start < span.end:
                place = (span.start - start).to_bytes(_ID_BYTES, "little", signed=True)
                link = sha256(link + b"medium" + span.medium.digest + place).digest()
        return link
