"""How an API process asks for another model, and says how far it is with it."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.foundation.config import Config

SwapMode = Literal["beside", "after"]
"""Whether the new model is loaded while the old one serves, or after it is gone."""
SwapPhase = Literal["loading", "draining", "stopping", "restoring", "done", "failed"]
"""What a swap waits for: the new model's start, open requests of the old one, the end of its processes, or the old
model's return. `beside` loads first, `after` last."""


class SwapRequest(msgspec.Struct, frozen=True, tag=True):
    """Serve another model.

    Attributes:
        asked: Settings as they were asked for, from which the next change starts.
        config: The same settings, resolved.
        drain_timeout: Seconds for open requests of the old model.
        hold_timeout: Seconds that new requests wait while no model serves.
        reasons: A line for each choice, for the log.
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
        state: `served`: new requests go to it. `released`: no request is open, and nobody talks to its engines.
            `refused`: it cannot be served, and `message` says why.
    """

    generation: int
    state: Literal["served", "released", "refused"]
    message: str = ""


class SwapStatus(msgspec.Struct, frozen=True):
    """How a swap proceeds.

    Attributes:
        number: The swap's number, from 1.
        model: The first name of the model that is asked for.
        reason: Why the swap failed.
        seconds: Its duration, once it has ended.
    """

    number: int
    model: str
    mode: SwapMode
    phase: SwapPhase
    reason: str = ""
    seconds: float | None = None

    @property
    def ended(self) -> bool:
        return self.phase in ("done", "failed")
