"""RoPE scalings that depend on the sequence's length: which length a sequence's keys are rotated for.

Two blocks hold equal keys only if their tokens and this length agree, so it is part of the prefix cache's salt. Knows
nothing about requests, plans or frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeLengthMode:
    """How a model's rotation of keys changes beyond the length it was first trained on.

    Attributes:
        original_max_len: Up to this length, in tokens, nothing changes.
        kind: `longrope`: beyond it all keys of a sequence use the long factors, so a sequence that grows beyond it is
            computed again from the start. `dynamic` (dynamic NTK): each key uses the sequence's length at the time it
            is computed, which for the whole prompt is the prompt's length.
    """

    original_max_len: int
    kind: Literal["longrope", "dynamic"]

    def rope_length(self, prompt_len: int, known: int) -> int:
        """The length that a sequence's next keys are rotated for, at least; `known` of its tokens are known. A later
        position uses its own length if that is larger."""
        return known if self.kind == "longrope" else prompt_len

    def salt(self, rope_length: int) -> str:
        """Tells keys that were rotated for `rope_length` from other keys of the same tokens."""
        if rope_length <= self.original_max_len:
            return ""
        return "long" if self.kind == "longrope" else f"length {rope_length}"
