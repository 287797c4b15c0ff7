"""Masks for the reads that wait for them: made when the tokens before them are known, sent once for each step.

A step's masks are due when it is the oldest in flight; until then its rows compute, and nobody's planning waits. Knows
nothing about grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.errors import GenerationError
from quire.executor.executor import Executor
from quire.messages import Add, Masks
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler


class Masker(Protocol):
    """The seam to what says which tokens may come next."""

    def wants(self, message: Add) -> bool:
        """Whether each token of this sequence is masked; asked once."""
        ...

    def bits(self, requests: Sequence[Request]) -> Sequence[bytes | GenerationError]:
        """For each the mask of its next token, after all of `request.tokens` (see `Masks.bits`); or why there is none,
        which ends the request."""
        ...

    def forget(self, request_id: int) -> None:
        """A sequence is over, wanted or not."""
        ...


class MaskSender:
    """Sends the masks of the oldest step in flight to the executor.

    Args:
        masker: Makes them.
        scheduler: Says which step is the oldest, and whose reads wait in it.
        executor: Where they go.
        vocab_size: Tokens in a mask.
    """

    def __init__(self, masker: Masker, scheduler: Scheduler, executor: Executor, vocab_size: int) -> None:
        self._masker = masker
        self._scheduler = scheduler
        self._executor = executor
        self._open = b"\xff" * (4 * -(-vocab_size // 32))
        self._sent = 0

    def send(self) -> list[Request]:
        """Send what is due and not sent yet. Requests that have no mask are over now: they are returned."""
        step, rows, requests = self._scheduler.masks_due()
        if not rows or step == self._sent:
            return []
        self._sent = step
        alive = [request for request in requests if request.ended is None]
        bits, failed = {}, []
        for request, mask in zip(alive, self._masker.bits(alive) if alive else (), strict=True):
            if isinstance(mask, GenerationError):
                self._scheduler.fail(request.id, mask.message)
                failed.append(request)
            else:
                bits[request.id] = mask
        # What a request draws that is over is dropped, but its row is in the step and waits.
        self._executor.masks(Masks(step, rows, [bits.get(request.id, self._open) for request in requests]))
        return failed

    def forget(self, request_id: int) -> None:
        """A request is over."""
        self._masker.forget(request_id)
