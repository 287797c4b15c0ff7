"""The tier in which each sequence keeps a cache of transformers' own, and is computed by itself."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor

from quire.models.fallback.halves import Halves
from quire.models.fallback.rows_only import RowsOnly

_CACHES = ("past_key_values", "cache_params", "state")
"""Names under which decoders take and return what they keep of a sequence."""


def cache_name(halves: Halves) -> str | None:
    """Return the name of a decoder's cache, as argument and in its output; None: it keeps none."""
    return next((name for name in _CACHES if name in halves.accepts), None)


class Advance(Enum):
    """How a sequence goes on behind what is computed of it. The first that agrees with a whole forward is used."""

    CHUNKS = "any number of tokens a forward"
    STEPS = "one token a forward behind the first chunk"
    AGAIN = "all tokens again in each forward"


class OwnCaches:
    """Computes rows one by one, each with the cache of its slot.

    A sequence's cache is dropped when its slot starts anew, or when another sequence gets one of its blocks. So there
    is never more in caches than the engine has counted as blocks.

    Attributes:
        advance: How sequences go on.
    """

    def __init__(self, halves: Halves) -> None:
        self._halves = halves
        self._name = cache_name(halves)
        self.advance = Advance.CHUNKS if self._name else Advance.AGAIN
        self._caches: dict[int, Any] = {}
        self._blocks: dict[int, set[int]] = {}
        self._owners: dict[int, int] = {}  # slots by block

    @property
    def ways(self) -> tuple[Advance, ...]:
        """The ways that may be tried, the fastest first."""
        return tuple(Advance) if self._name else (Advance.AGAIN,)

    def clear(self) -> None:
        """Drop all sequences."""
        self._caches.clear()
        self._blocks.clear()
        self._owners.clear()

    def hidden(self, tokens: Tensor, backend: RowsOnly, positions: Tensor | None = None) -> Tensor:
        """Compute hidden states of a step's rows: tokens [tokens] → [tokens, hidden].

        Args:
            positions: Time, row and column of each token, [3, tokens]; None: positions count tokens.
        """
        rows = backend.rows
        assert rows is not None, "the step was not prepared"
        tables, dummy = rows.tables[0], len(rows.tables[0]) - 1
        parts, first = [], 0
        for slot, count, start in zip(rows.slots.tolist(), rows.counts.tolist(), rows.bounds.tolist(), strict=True):
            if not count:
                continue
            if not start:
                self._drop(slot)
            before = self._caches.pop(slot) if start and slot != dummy else None
            own = None if positions is None else positions[:, None, first : first + count]
            hidden, cache = self._advance(tokens[first : first + count].clone(), before, own)
            parts.append(hidden)
            first += count
            if slot != dummy:
                size = backend.block_size
                self._take_blocks(slot, tables[slot, start // size : (start + count - 1) // size + 1].tolist())
                self._caches[slot] = cache
        return torch.cat(parts)

    def _take_blocks(self, slot: int, blocks: list[int]) -> None:
        """Note that a sequence has these blocks, and drop the ones that had them before: they have ended."""
        for block in blocks:
            owner = self._owners.get(block)
            if owner is not None and owner != slot:
                self._drop(owner)
            self._owners[block] = slot
            self._blocks.setdefault(slot, set()).add(block)

    def _drop(self, slot: int) -> None:
        """Drop the sequence of a slot, if it has one."""
        self._caches.pop(slot, None)
        for block in self._blocks.pop(slot, ()):
            del self._owners[block]

    def _advance(self, tokens: Tensor, before: Any, positions: Tensor | None) -> tuple[Tensor, Any]:
        """Compute tokens behind what is `before`: a cache, or all tokens so far."""
        if self.advance is Advance.AGAIN:
            assert positions is None, "a model that counts tokens"
            known = tokens if before is None else torch.cat((before, tokens))
            without = {"use_cache": False} if "use_cache" in self._halves.accepts else {}
            return self._halves.hidden(known, **without)[0][-len(tokens) :], known
        if self.advance is Advance.CHUNKS or before is None:
            return self._step(tokens, before, positions)
        parts = []
        for place, token in enumerate(torch.split(tokens, 1)):
            own = None if positions is None else positions[..., place : place + 1]
            hidden, before = self._step(token, before, own)
            parts.append(hidden)
        return torch.cat(parts), before

    def _step(self, tokens: Tensor, before: Any, positions: Tensor | None) -> tuple[Tensor, Any]:
        assert self._name is not None
        inputs = {self._name: before, "use_cache": True}
        if positions is not None:
            inputs["position_ids"] = positions
        hidden, output = self._halves.hidden(tokens, **inputs)
        return hidden, getattr(output, self._name)
