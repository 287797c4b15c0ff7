"""Models whose keys depend on how long their sequence is: which length a sequence counts as, so that equal salts and
equal tokens mean equal keys.

Knows nothing about requests, plans or how a model uses the length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class KeysByLength:
    """How keys change beyond a length.

    Attributes:
        original: Up to this length they do not.
        change: `turn`: beyond it all keys of a sequence are others, and one that grows beyond it is computed again.
            `grow`: each key goes by the length that its sequence has when it is computed, a prompt's by the prompt's.
    """

    original: int
    change: Literal["turn", "grow"]

    def counts_as(self, prompt_len: int, known: int) -> int:
        """The length that a sequence counts as when its keys begin to be computed; `known` tokens are known then. Later
        tokens count themselves."""
        return known if self.change == "turn" else prompt_len

    def salt(self, length: int) -> str:
        """What tells keys of sequences that count as `length` from others of the same tokens."""
        if length <= self.original:
            return ""
        return "long" if self.change == "turn" else f"length {length}"
