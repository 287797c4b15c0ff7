"""What the target model lends to a draft head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.compute.collectives.delta import Stream
from quire.models.layers.rotary import Positions


class LentStates(Protocol):
    """The state that a draft head reads with each token: the target model's, or its own after a drafted token."""

    def take(self) -> Tensor:
        """Return the states [tokens, hidden]; the caller may change them."""
        ...

    def keep(self, states: Tensor) -> None:
        """Keep the head's own states [tokens, hidden] of this step; each sampled position's state is its slot's next
        one.
        """
        ...


@dataclass(frozen=True)
class Lent:
    """What a target model lends to its draft head.

    Attributes:
        embed: Returns the embeddings of tokens at positions, with which the stream begins.
        logits: Returns the logits [n, vocab_size] of normed states [n, hidden].
        states: The states that the head reads.
    """

    embed: Callable[[Tensor, Positions], Stream]
    logits: Callable[[Tensor], Tensor]
    states: LentStates
