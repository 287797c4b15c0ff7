"""Which requests are turned away because the queue is too long: 429, and when to come back.

How long the queue is and how fast it is worked off is known of each engine (`EngineQueue`); the server's is their sum.
While several tenants have requests in the queue, each may fill an equal share of it, even if the others have filled it
already: then it grows beyond the limit, at most to OVERFLOW times as much.

With several API processes each sees the others' requests a step late, so the queue may become a little longer. Whose
they are it hears twice a second (`QueueShares`); of what it does not know it supposes that the tenants' shares are as
those of the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.engine.metrics.stats import Limit
from quire.errors import OverloadedError
from quire.foundation.config import SchedulerConfig
from quire.foundation.messages.to_engine import Add
from quire.serving.api.engine_queue import EngineQueue

OVERFLOW = 2
FULL_SHARE = 1 / 16
"""A queue counts as full at the latest when less than this share of its limit is left."""
MAX_RETRY_S = 3_600
MAX_SHARES = 256
"""Tenants that an API process tells the others of."""
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


class QueueShares(NamedTuple):
    """What an API process has sent to the queue, by tenant."""

    sequences: Mapping[str, int]
    tokens: Mapping[str, int]


@dataclass(frozen=True)
class _Queued:
    """A sequence that has brought nothing yet."""

    tenant: str
    tokens: int


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
        self._own: dict[int, _Queued] = {}  # by sequence
        self._own_tokens, self._own_sequences = Counter[str](), Counter[str]()  # by tenant
        self._others: dict[int, QueueShares] = {}  # by API process

    def leave_queue(self, sequences: Collection[int]) -> None:
        """These have brought tokens, have ended, or are not wanted any more. Others are ignored."""
        for queue in self._queues:
            queue.release(sequences)
        for sequence in self._own.keys() & sequences if self._own else ():
            left = self._own.pop(sequence)
            self._own_tokens[left.tenant] -= left.tokens
            self._own_sequences[left.tenant] -= 1
            if not self._own_sequences[left.tenant]:
                del self._own_tokens[left.tenant], self._own_sequences[left.tenant]

    @property
    def shares(self) -> QueueShares:
        """Of this process; of very many tenants those that have most."""
        most = dict(self._own_tokens.most_common(MAX_SHARES))
        return QueueShares({tenant: self._own_sequences[tenant] for tenant in most}, most)

    def share(self, process: int, shares: QueueShares) -> None:
        """What another process has sent."""
        self._others[process] = shares

    def _sequences_by_tenant(self) -> Counter[str]:
        return self._own_sequences + sum((Counter(other.sequences) for other in self._others.values()), Counter())

    def _tokens_by_tenant(self) -> Counter[str]:
        return self._own_tokens + sum((Counter(other.tokens) for other in self._others.values()), Counter())

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

    def refuse_if_full(self, tenant: str) -> None:
        """Look whether the queue is full before a tenant's request is read: to turn it away has to cost as little as
        possible, or a flood takes the time that those need which were let in.

        A queue is full when it has no room for as much as those that were let in brought lately on average, or for
        FULL_SHARE of its limit if that is less.

        Raises:
            OverloadedError: It is.
        """
        self.check(tenant, 1, min(self._usual_tokens, FULL_SHARE * self.max_tokens))

    def enter(self, adds: Sequence[Add], *, continuing: bool = False) -> None:
        """Let a request of one tenant into the queue, as a whole or not at all; each of its prompts goes to an engine,
        whose queue expects it.

        Args:
            adds: Its sequences, each prompt's first one with its forks, the others without.
            continuing: It belongs to a request that was let in before, and is let in whatever the queue.

        Raises:
            OverloadedError: The queue would be too long.
        """
        expected = sum(queue.load.expected_output for queue in self._queues) / len(self._queues)
        prompts = [(add, add.queued_tokens(expected)) for add in adds if add.fork_of is None]
        if not continuing:
            tokens = sum(tokens for _, tokens in prompts)
            self.check(adds[0].tenant, len(adds), tokens)
            self._usual_tokens += _LEARNING_RATE * (tokens - self._usual_tokens)
        for add, of_prompt in prompts:
            for sequence in (add.id, *(fork.id for fork in add.forks)):
                self._own[sequence] = _Queued(add.tenant, of_prompt // (1 + len(add.forks)))
                self._own_tokens[add.tenant] += self._own[sequence].tokens
                self._own_sequences[add.tenant] += 1

    def check(self, tenant: str, sequences: int, tokens: float) -> None:
        """Refuse what `enter` would refuse, as far as is known of it: before there are Adds, that is less than all.

        Raises:
            OverloadedError: The queue would be too long.
        """
        most = math.inf if self._limits.requests is None else self._limits.requests
        if not _has_room(self.sequences, sequences, most, tenant, self._sequences_by_tenant):
            self._refuse("requests")
        if not _has_room(self.tokens, tokens, self.max_tokens, tenant, self._tokens_by_tenant):
            self._refuse("tokens")

    def _refuse(self, limit: Limit) -> None:
        self._rejections[limit] += 1
        retry = min(MAX_RETRY_S, max(1, math.ceil(self.seconds)))
        raise OverloadedError(
            f"The server has more requests than it can answer soon: {self.sequences} wait. "
            f"Send the request again in {retry} s.",
            retry_after_s=retry,
        )


def _has_room(queued: int, more: float, most: float, tenant: str, by_tenant: Callable[[], Counter[str]]) -> bool:
    """Whether a tenant's request for `more` may join a queue that has `queued`, of which `by_tenant` is known."""
    if not queued or queued + more <= most:
        return True
    if queued + more > OVERFLOW * most:
        return False
    known = by_tenant()
    if not known[tenant]:
        return True
    of_tenant = known[tenant] * max(1.0, queued / known.total())
    return of_tenant + more <= most / max(2, len(known))
