"""Which requests are turned away because the queue is too long: 429, and when to come back.

How long the queue is and how fast it is worked off is known of each engine (`EngineQueue`); the server's is their sum,
also with several API processes. Each of these sees the others' requests a step late, so the queue may become a little
longer. Knows nothing about tenants: the engine serves them in turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.engine.metrics.stats import Limit
from quire.errors import OverloadedError
from quire.foundation.config import SchedulerConfig
from quire.foundation.messages.to_engine import Add
from quire.serving.api.session.placement import EngineQueue

FULL_SHARE = 1 / 16
"""A queue counts as full at the latest when less than this share of its limit is left."""
MAX_RETRY_S = 3_600
_LEARNING_RATE = 1 / 16


@dataclass(frozen=True)
class QueueLimits:
    """How long the queue may be; a request that meets an empty queue is always let in.

    Attributes:
        requests: Sequences; None for any number.
        tokens: In tokens; None: as many as are worked off within `seconds`.
        seconds: See `tokens`.
        slots: Sequences that an engine runs at once.
    """

    requests: int | None
    tokens: int | None
    seconds: float
    slots: int


def queue_limits(config: SchedulerConfig) -> QueueLimits:
    """As they are configured."""
    return QueueLimits(
        config.max_queued_requests, config.max_queued_tokens, config.max_queue_time, config.max_num_seqs or 1
    )


class AdmissionLimit:
    """The limit of one API process.

    Args:
        limits: How long the queue may be, of all engines together.
        queues: What is known of each engine's.
        rejections: Where requests that are turned away are counted, by what there was too much of.
    """

    def __init__(self, limits: QueueLimits, queues: Sequence[EngineQueue], rejections: dict[Limit, int]) -> None:
        self._limits = limits
        self._queues = queues
        self._rejections = rejections
        self._usual_tokens = 0.0  # of a request that was let in, on average

    # --- the queue --------------------------------------------------------------------------------------------------

    @property
    def sequences(self) -> int:
        """Sequences in the queue."""
        return sum(queue.sequences for queue in self._queues)

    @property
    def tokens(self) -> int:
        """Tokens that are to be computed for them, see `messages.to_engine.queued_tokens`."""
        return sum(queue.tokens for queue in self._queues)

    @property
    def max_tokens(self) -> float:
        """Most tokens that may be in the queue."""
        if self._limits.tokens is not None:
            return self._limits.tokens
        speed = self._tokens_per_s
        return self._limits.seconds * speed if speed else math.inf

    @property
    def seconds(self) -> float:
        """How long the engines need for the queue; 0 if nobody knows."""
        speed = self._tokens_per_s
        return self.tokens / speed if speed else 0.0

    @property
    def _tokens_per_s(self) -> float:
        return sum(queue.load.tokens_per_s for queue in self._queues)

    # --- requests ---------------------------------------------------------------------------------------------------

    def refuse_if_full(self) -> None:
        """Look whether the queue is full before a request is read: to turn it away has to cost as little as possible,
        or a flood takes the time that those need which were let in.

        A queue is full when it has no room for as much as those that were let in brought lately on average, or for
        FULL_SHARE of its limit if that is less.

        Raises:
            OverloadedError: It is.
        """
        self.check(1, min(self._usual_tokens, FULL_SHARE * self.max_tokens))

    def enter(self, adds: Sequence[Add]) -> None:
        """Let a request into the queue, as a whole or not at all; each of its prompts goes to an engine, whose queue
        expects it.

        Args:
            adds: Its sequences, each prompt's first one with its forks, the others without.

        Raises:
            OverloadedError: The queue would be too long.
        """
        expected = sum(queue.load.expected_output for queue in self._queues) / len(self._queues)
        tokens = sum(add.queued_tokens(expected) for add in adds if add.fork_of is None)
        self.check(len(adds), tokens)
        self._usual_tokens += _LEARNING_RATE * (tokens - self._usual_tokens)

    def check(self, sequences: int, tokens: float) -> None:
        """Refuse what `enter` would refuse, as far as is known of it: before there are Adds, that is less than all.

        Raises:
            OverloadedError: The queue would be too long.
        """
        most = self._limits.requests
        if most is not None and self.sequences and self.sequences + sequences > most:
            self._refuse("requests")
        if self.tokens and self.tokens + tokens > self.max_tokens:
            self._refuse("tokens")

    def _refuse(self, limit: Limit) -> None:
        self._rejections[limit] += 1
        retry = min(MAX_RETRY_S, max(1, math.ceil(self.seconds)))
        raise OverloadedError(
            f"The server has more requests than it can answer soon: {self.sequences} wait. "
            f"Send the request again in {retry} s.",
            retry_after_s=retry,
        )
