"""The layout of memory that ranks share: a line for each, one more, then two sets of a buffer for each. No torch.

A line begins with the number of collectives that its rank has come to (uint32); the last line has 1 + the rank that
another has waited for in vain. `compute/kernels/cpu/native/ranks.cpp` has the protocol. Where engines share experts, a
line also has the number of steps that its rank has begun, and its state.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from quire.compute.mesh import Mesh

LINE = 64
"""Bytes of a line; words that different ranks write are at least this far apart."""
BUFFER_BYTES = 1 << 20
"""The minimum bytes of a buffer. Larger tensors go piece by piece, so that other ranks read from a cache."""
_WORD = 4
_BEGUN, _STATE = 2, 3
"""Words of a line behind those of the kernels."""


class RankState(IntEnum):
    """The state of a rank that shares experts with other engines."""

    LOADING = 0
    SERVING = 1
    LEAVING = 2


def memory_bytes(mesh: Mesh, vocab_size: int) -> int:
    """Return the bytes of the memory of ranks that divide layers, for logits of `vocab_size` columns."""
    return LINE * (mesh.tp + 1) + 2 * mesh.tp * buffer_bytes(mesh, vocab_size)


def buffer_bytes(mesh: Mesh, vocab_size: int) -> int:
    """Return the bytes of a buffer, which has room for a rank's logits of one position, in fp32."""
    return max(BUFFER_BYTES, -(-4 * -(-vocab_size // mesh.tp) // LINE) * LINE)


def calls_of(words: Sequence[int], rank: int) -> int:
    """Return how many collectives a rank has come to; `words` is the memory as uint32."""
    return int(words[rank * LINE // _WORD])


def missing_rank(words: Sequence[int], ranks: int) -> int | None:
    """Return the rank that another has waited for in vain, or None."""
    number = int(words[ranks * LINE // _WORD])
    return number - 1 if number else None


def group_bytes(mesh: Mesh) -> int:
    """Return the bytes of the memory of the ranks of all engines that divide experts."""
    return memory_bytes(Mesh(tp=mesh.ep), 0)


def steps_begun(words: Sequence[int], rank: int) -> int:
    """Return how many steps a rank has begun together with other engines, modulo 2³²."""
    return int(words[rank * LINE // _WORD + _BEGUN])


def begin_step(words: memoryview, rank: int) -> None:
    words[rank * LINE // _WORD + _BEGUN] = (steps_begun(words, rank) + 1) & 0xFFFFFFFF


def state_of(words: Sequence[int], rank: int) -> RankState:
    return RankState(words[rank * LINE // _WORD + _STATE])


def set_state(words: memoryview, rank: int, state: RankState) -> None:
    words[rank * LINE // _WORD + _STATE] = state
