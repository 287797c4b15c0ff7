"""Where ranks that share memory write: a line each, one more, then two sets of a buffer each. Imports no torch.

A line begins with the number of collectives that its rank has come to (uint32); the last one has 1 + the rank that
another has waited for in vain. `kernels/cpu/native/ranks.cpp` has the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.mesh import Mesh

LINE = 64
"""Bytes: what ranks write lies this far apart."""
BUFFER_BYTES = 1 << 20
"""Of a buffer at least. Larger tensors go piece by piece, so that what others read is still in a cache."""
_WORD = 4


def memory_bytes(mesh: Mesh, vocab_size: int) -> int:
    """Bytes that ranks which divide layers share; `vocab_size`: columns of logits."""
    return LINE * (mesh.tp + 1) + 2 * mesh.tp * buffer_bytes(mesh, vocab_size)


def buffer_bytes(mesh: Mesh, vocab_size: int) -> int:
    """Bytes of a buffer: at least one position's logits of a rank, in fp32."""
    return max(BUFFER_BYTES, -(-4 * -(-vocab_size // mesh.tp) // LINE) * LINE)


def calls_of(words: Sequence[int], rank: int) -> int:
    """Collectives that a rank has come to; `words`: the memory as uint32."""
    return int(words[rank * LINE // _WORD])


def missing_rank(words: Sequence[int], ranks: int) -> int | None:
    """The rank that another has waited for in vain."""
    number = int(words[ranks * LINE // _WORD])
    return number - 1 if number else None
