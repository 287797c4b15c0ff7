"""Token masks for constrained requests: computed when the tokens before are known, sent once for each step.

A step's masks are due when it is the oldest in flight; meanwhile its rows compute, and planning goes on. Knows nothing
about grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.errors import GenerationError
from quire.executor.executor import Executor
from quire.messages import Add, TokenBitmasks
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler

GRAMMAR = "grammar"
"""What a request awaits until its masks can be made."""


class TokenBitmaskSource(Protocol):
    """The seam to what says which tokens may come next: a grammar, say."""

    def wants(self, message: Add) -> bool:
        """Whether the tokens of this sequence are masked; asked once."""
        ...

    def prepare(self, message: Add) -> bool:
        """A sequence that is masked waits. Returns whether its bits can be asked for at once; else it runs only when
        `prepared` has named it."""
        ...

    def prepared(self) -> list[tuple[int, str]]:
        """Sequences whose bits can be asked for by now, since the last call; or that have failed, and why."""
        ...

    def bits(self, requests: Sequence[Request]) -> Sequence[bytes | GenerationError | None]:
        """For each request the bitmask of the token after `request.tokens` (see `TokenBitmasks.bits`), the error that
        ends it, or None: it is complete, and no token may follow."""
        ...

    def forget(self, request_id: int) -> None:
        """A sequence has ended; called for unmasked ones too."""
        ...

    def close(self) -> None:
        """No more is asked for."""
        ...


class TokenBitmaskSender:
    """Sends the masks of the oldest step in flight to the executor.

    Args:
        masker: Makes them.
        scheduler: Knows the oldest step in flight and its masked rows.
        executor: Where they go.
        vocab_size: Tokens in a mask.
    """

    def __init__(self, masker: TokenBitmaskSource, scheduler: Scheduler, executor: Executor, vocab_size: int) -> None:
        self._masker = masker
        self._scheduler = scheduler
        self._executor = executor
        self._open = b"\xff" * (4 * -(-vocab_size // 32))
        self._sent = 0

    def send(self) -> list[Request]:
        """Send the masks that are due, once. Returns the requests that got none: they are over."""
        step, rows, requests = self._scheduler.bitmasks_due()
        if not rows or step == self._sent:
            return []
        self._sent = step
        alive = [request for request in requests if request.ended is None]
        bits, ended = {}, []
        for request, mask in zip(alive, self._masker.bits(alive) if alive else (), strict=True):
            if mask is None:
                self._scheduler.stop(request.id)
                ended.append(request)
            elif isinstance(mask, GenerationError):
                self._scheduler.fail(request.id, mask.message)
                ended.append(request)
            else:
                bits[request.id] = mask
        # An ended request's row is still in the step and waits; its token is dropped.
        self._executor.submit_bitmasks(
            TokenBitmasks(step, rows, [bits.get(request.id, self._open) for request in requests])
        )
        return ended

    def prepare(self, message: Add) -> tuple[str, ...]:
        """A sequence arrives. Returns what it has to wait for, see `Request.awaits`."""
        return (GRAMMAR,) if self._masker.wants(message) and not self._masker.prepare(message) else ()

    def release_prepared(self) -> list[Request]:
        """Requests whose masks can be made by now no longer wait for that. Returns those that have failed instead."""
        failed = []
        for request_id, error in self._masker.prepared():
            if not error:
                self._scheduler.arrived(request_id, GRAMMAR)
            elif (request := self._scheduler.fail(request_id, error)) is not None:
                failed.append(request)
        return failed

    def forget(self, request_id: int) -> None:
        """A request has ended."""
        self._masker.forget(request_id)
