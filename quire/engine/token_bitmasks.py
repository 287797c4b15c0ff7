"""Token masks for constrained requests: computed when the tokens before are known, sent once for each step.

A step's masks are due when it is the oldest in flight; meanwhile its rows compute, and planning goes on. Knows nothing
about grammars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Protocol

from quire.errors import QuireError, RequestError
from quire.foundation.messages.from_engine import EndReason
from quire.foundation.messages.to_engine import Add
from quire.foundation.messages.workers import Bits, MaskedDrafts, TokenBitmasks
from quire.runtime.executor.executor import Executor
from quire.scheduling.scheduler.request import Request
from quire.scheduling.scheduler.scheduler import Scheduler
from quire.scheduling.scheduler.step import ScheduledStep

GRAMMAR = "grammar"
"""What a request awaits until its masks can be made."""
Drafts = Mapping[int, Sequence[int]]
"""Draft tokens behind a request's tokens, by request; a request that is missing has none."""
Masks = Sequence[Bits] | QuireError | None
"""A request's bitmasks: of its next token, and then behind its drafts, up to where no draft can stay. Or the error that
ends the request, a RequestError if what it asks for is to blame; or None: it is complete, and no token may follow."""


class TokenBitmaskSource(Protocol):
    """The seam to what says which tokens may come next, such as a grammar."""

    def wants(self, message: Add) -> bool:
        """Whether the tokens of this sequence are masked; asked once."""

    def prepare(self, message: Add) -> bool:
        """Prepare a sequence that is masked and waits. Returns whether its bits can be asked for at once; else it runs
        only when `prepared` has named it."""

    def prepared(self) -> list[tuple[int, QuireError | None]]:
        """Sequences whose bits can be asked for since the last call, or that have failed, and why."""

    def ask(self, requests: Sequence[Request], drafts: Drafts) -> bool:
        """Begin to make the bitmask of the token after `request.tokens` for each request, and those behind its drafts;
        `bits` follows. Returns whether `bits` need not wait."""

    def bits(self) -> Sequence[Masks]:
        """The bitmasks that were asked for, waiting for them. They stay as they are until the next `ask`."""

    def forget(self, request_id: int) -> None:
        """Forget a sequence that has ended; called for unmasked ones too."""

    def close(self) -> None:
        """Release what makes masks, because none are asked for any more."""


class TokenBitmaskSender:
    """Sends the masks of the oldest step in flight, which `masker` makes, to the executor."""

    def __init__(self, masker: TokenBitmaskSource, scheduler: Scheduler, executor: Executor, vocab_size: int) -> None:
        self._masker = masker
        self._scheduler = scheduler
        self._executor = executor
        self._open = b"\xff" * (4 * -(-vocab_size // 32))
        self._asked: tuple[ScheduledStep, list[Request]] | None = None  # whose requests were not over: masks come
        self._drafts = MaskedDrafts(0, [])  # the last ones
        self._last = 0  # the last step that was asked for
        scheduler.resources.append(self)

    def ask(self) -> list[Request]:
        """Have the masks made that are due, once, but not before the drafts are known that they depend on. Meanwhile
        the engine plans and talks to clients. Masks that are there at once are sent; returns what `send` returns."""
        due = self._scheduler.bitmasks_due()
        if due is None or due.number == self._last or (due.awaits_drafts and due.number != self._drafts.step):
            return []
        self._last = due.number
        requests = [due.requests[row] for row in due.masked]
        alive = [request for request in requests if request.ended is None]
        self._asked = due, alive
        drafts: Drafts = {}
        if due.awaits_drafts:
            drafts = {request.id: own for request, own in zip(requests, self._drafts.tokens, strict=True) if own}
        return self._send_asked() if not alive or self._masker.ask(alive, drafts) else []

    def drafted(self, drafts: MaskedDrafts) -> list[Request]:
        """Take in the drafts of the oldest step in flight; then do as `ask`."""
        self._drafts = drafts
        return self.ask()

    def send(self) -> list[Request]:
        """Send the masks that are due, once. Returns requests that got none because they are over."""
        return [*self.ask(), *self._send_asked()]

    def _send_asked(self) -> list[Request]:
        asked, self._asked = self._asked, None
        if asked is None:
            return []
        step, alive = asked
        masks: dict[int, Sequence[Bits]] = {}
        ended = []
        for request, mask in zip(alive, self._masker.bits() if alive else (), strict=True):
            over = None
            if mask is None:
                over = self._scheduler.end(request.id, "stop")
            elif isinstance(mask, QuireError):
                over = self._fail(request.id, mask)
            else:
                masks[request.id] = mask
            if over is not None:  # else it was aborted meanwhile
                ended.append(over)
        # An ended request's row is still in the step and waits; its token is dropped.
        by_row = [masks.get(step.requests[row].id, (self._open,)) for row in step.masked]
        counts = [len(each) for each in by_row] if any(len(each) > 1 for each in by_row) else []
        self._executor.submit_bitmasks(TokenBitmasks(step.number, step.masked, [*chain(*by_row)], counts))
        return ended

    def prepare(self, message: Add) -> tuple[str, ...]:
        """Prepare a new sequence. Returns what it has to await, see `Request.awaits`."""
        return (GRAMMAR,) if self._masker.wants(message) and not self._masker.prepare(message) else ()

    def release_prepared(self) -> list[Request]:
        """Let requests run whose masks can be made now. Returns those that have failed instead."""
        failed = []
        for request_id, error in self._masker.prepared():
            if error is None:
                self._scheduler.arrived(request_id, GRAMMAR)
            elif (request := self._fail(request_id, error)) is not None:
                failed.append(request)
        return failed

    def _fail(self, request_id: int, error: QuireError) -> Request | None:
        reason: EndReason = "refused" if isinstance(error, RequestError) else "error"
        return self._scheduler.end(request_id, reason, error.message)

    def release(self, request: Request) -> None:
        """Let the masker forget a request that is over."""
        if request.ended is not None:
            self._masker.forget(request.id)
