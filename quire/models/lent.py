"""What a draft head is lent by the model that it proposes tokens for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.compute.collectives.delta import Stream
from quire.models.layers.rotary import Positions


class LentStates(Protocol):
    """The state that each token of a step is read with: the model's, or for a token behind a draft the head's own."""

    def take(self) -> Tensor:
        """[tokens, hidden]; the caller may change them."""
        ...

    def keep(self, states: Tensor) -> None:
        """The head's own states [tokens, hidden] of this step: that of each sampled position is its slot's next one."""
        ...


@dataclass(frozen=True)
class Lent:
    """Of a model.

    Attributes:
        embed: Tokens and positions to the stream that begins with the tokens' embeddings.
        states: See LentStates.
    """

    embed: Callable[[Tensor, Positions], Stream]
    states: LentStates
