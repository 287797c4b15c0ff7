"""How an API process asks for another model, and says how far it is with it. Plain data."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.foundation.config import Config

SwapMode = Literal["beside", "after"]
"""Whether the new model is loaded while the old one serves, or when it is gone."""
SwapPhase = Literal["loading", "draining", "stopping", "restoring", "done", "failed"]
"""What a swap waits for: the new model's start, open requests of the old one, its processes' end, or that the old model
is back. `beside` loads first, `after` last."""


class SwapRequest(msgspec.Struct, frozen=True, tag=True):
    """Serve this model.

    Attributes:
        asked: Settings as they were asked for: what the next change starts from.
        config: The same, resolved.
        mode: See SwapMode.
        drain_timeout: What open requests of the old model get, in seconds.
        hold_timeout: How long new requests wait while no model serves, in seconds.
        reasons: For the log, a line for each choice.
    """

    asked: Config
    config: Config
    mode: SwapMode
    drain_timeout: float
    hold_timeout: float
    reasons: tuple[str, ...] = ()


class ModelReport(msgspec.Struct, frozen=True, tag=True):
    """What has become of a model in the API process.

    Attributes:
        generation: Which model.
        state: `served`: new requests go to it. `released`: nothing is open, and nobody talks to its engines any more.
            `refused`: it cannot be served, `message` says why.
    """

    generation: int
    state: Literal["served", "released", "refused"]
    message: str = ""


class SwapStatus(msgspec.Struct, frozen=True):
    """How a swap proceeds.

    Attributes:
        number: Of the swap, from 1 on.
        model: The first name of the model that is asked for.
        mode: See SwapMode.
        phase: What it waits for.
        reason: Why it failed.
        seconds: From its beginning to its end, once it has ended.
    """

    number: int
    model: str
    mode: SwapMode
    phase: SwapPhase
    reason: str = ""
    seconds: float | None = None

    @property
    def ended(self) -> bool:
        """Whether the next one may begin."""
        return self.phase in ("done", "failed")
