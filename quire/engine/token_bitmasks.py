"""Token masks for constrained requests: computed when the tokens before are known, sent once for each step.

A step's masks are due when it is the oldest in flight; meanwhile its rows compute, and planning goes on. Knows nothing
about grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.errors import GenerationError
from quire.executor.executor import Executor
from quire.messages import Add, Bits, TokenBitmasks
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

    def ask(self, requests: Sequence[Request]) -> bool:
        """Begin to make the bitmask of the token after `request.tokens` for each request; `bits` follows. Returns
        whether it need not wait."""
        ...

    def bits(self) -> Sequence[Bits | GenerationError | None]:
        """What was asked for, waiting for it: for each request its bitmask (see `TokenBitmasks.bits`), which stays as
        it is until the next `ask`; the error that ends it; or None: it is complete, and no token may follow."""
        ...

    def forget(self, request_id: int) -> None:
        """A sequence has ended; called for unmasked ones too."""
        ...

    def close(self) -> None:
        """No more is asked for."""
        ...


@dataclass(frozen=True)
class _Asked:
    """A step whose masks were asked for.

    Attributes:
        step: Its number.
        rows: See `Plan.masked`.
        requests: Theirs.
        alive: Those of them that were not over, whose masks come.
    """

    step: int
    rows: list[int]
    requests: list[Request]
    alive: list[Request]


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
        self._asked: _Asked | None = None
        self._last = 0  # the last step that was asked for

    def ask(self) -> list[Request]:
        """Have the masks made that are due, once: while they are, the engine plans and talks to clients. If they are
        there at once, this is as `send`."""
        step, rows, requests = self._scheduler.bitmasks_due()
        if not rows or step == self._last:
            return []
        self._last = step
        alive = [request for request in requests if request.ended is None]
        self._asked = _Asked(step, rows, requests, alive)
        return self._send_asked() if not alive or self._masker.ask(alive) else []

    def send(self) -> list[Request]:
        """Send the masks that are due, once. Returns the requests that got none: they are over."""
        return [*self.ask(), *self._send_asked()]

    def _send_asked(self) -> list[Request]:
        asked, self._asked = self._asked, None
        if asked is None:
            return []
        bits, ended = {}, []
        for request, mask in zip(asked.alive, self._masker.bits() if asked.alive else (), strict=True):
            over = None
            if mask is None:
                over = self._scheduler.stop(request.id)
            elif isinstance(mask, GenerationError):
                over = self._scheduler.fail(request.id, mask.message)
            else:
                bits[request.id] = mask
            if over is not None:  # else it was aborted meanwhile
                ended.append(over)
        # An ended request's row is still in the step and waits; its token is dropped.
        self._executor.submit_bitmasks(
            TokenBitmasks(asked.step, asked.rows, [bits.get(request.id, self._open) for request in asked.requests])
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
