"""Which requests are turned away because the queue is too long: 429, and when to come back.

The engine says how long its queue is and how fast it works it off (`Load`); what this process has sent since is added,
and what it has let in and holds back, because the engine may not have it yet.
While several tenants have requests in the queue, each may fill an equal share of it, even if the others have filled it
already: then it grows beyond the limit, at most to OVERFLOW times as much.

With several API processes each sees the others' requests a step late, so the queue may become a little longer; and each
supposes that the tenants' shares of the whole queue are as those of what it has sent itself.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from quire.config import SchedulerConfig
from quire.errors import OverloadedError
from quire.messages import Add, Load, queued_tokens
from quire.metrics.stats import Limit

OVERFLOW = 2
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
        slots: Sequences that run at once.
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


@dataclass(frozen=True)
class _Queued:
    """A sequence that has brought nothing yet."""

    tenant: str
    tokens: int


class AdmissionLimit:
    """The limit of one API process.

    Args:
        limits: How long the queue may be.
        rejections: Where requests that are turned away are counted, by what there was too much of.
    """

    def __init__(self, limits: QueueLimits, rejections: dict[Limit, int]) -> None:
        self._limits = limits
        self._rejections = rejections
        self._load = Load()
        self._unseen = OrderedDict[int, tuple[int, int]]()  # Adds after `load`, by last id: sequences, tokens
        self._unseen_sequences = self._unseen_tokens = 0
        self._held: dict[int, int] = {}  # tokens by sequence
        self._held_tokens = 0
        self._usual_tokens = 0.0  # of a request that was let in, on average
        self._own: dict[int, _Queued] = {}  # by sequence
        self._own_tokens, self._own_sequences = Counter[str](), Counter[str]()  # by tenant

    # --- what the engine says ---------------------------------------------------------------------------------------

    def observe(self, load: Load, last_add: int) -> None:
        """What the engine has to do, everything up to the Add `last_add` of this process included."""
        self._load = load
        while self._unseen and (first := next(iter(self._unseen))) <= last_add:
            self._forget_unseen(first)

    def restart(self) -> None:
        """Another engine takes over. It has been sent nothing yet, and is as fast as the one before."""
        before = self._load
        self._load = Load(tokens_per_s=before.tokens_per_s, expected_output=before.expected_output)
        self._unseen.clear()
        self._unseen_sequences = self._unseen_tokens = 0

    def expect(self, add: Add) -> None:
        """An Add that was let in before goes to that engine."""
        self._release((add.id, *(fork.id for fork in add.forks)))
        self._await(add, add.queued_tokens(self._load.expected_output))

    def hold(self, adds: Iterable[Add]) -> None:
        """These sequences were let in, and the present engine is not told of them until `expect`."""
        for add in adds:
            if add.fork_of is None:
                self._forget_unseen(add.last_id)
            if add.id not in self._held:
                prompt, output = len(add.tokens) if add.fork_of is None else 1, add.sampling.max_tokens or 0
                tokens = queued_tokens(add.sampling, prompt, min(output, self._load.expected_output))
                self._held[add.id] = tokens
                self._held_tokens += tokens

    def leave_queue(self, sequences: Collection[int]) -> None:
        """These have brought tokens, have ended, or are not wanted any more. Others are ignored."""
        self._release(sequences)
        for sequence in self._own.keys() & sequences if self._own else ():
            left = self._own.pop(sequence)
            self._own_tokens[left.tenant] -= left.tokens
            self._own_sequences[left.tenant] -= 1
            if not self._own_sequences[left.tenant]:
                del self._own_tokens[left.tenant], self._own_sequences[left.tenant]

    # --- the queue --------------------------------------------------------------------------------------------------

    @property
    def sequences(self) -> int:
        """Sequences in the queue. The latest ones find free slots first."""
        free = 0 if self._load.waiting else self._limits.slots - self._load.running
        return self._load.waiting + max(0, self._unseen_sequences + len(self._held) - free)

    @property
    def tokens(self) -> int:
        """Tokens that are to be computed for them, see `quire.messages.queued_tokens`."""
        unseen = 0 if self._unseen_run_at_once else self._unseen_tokens
        return self._load.queued_tokens + unseen + self._held_tokens

    @property
    def max_tokens(self) -> float:
        """Most tokens that may be in the queue."""
        if self._limits.tokens is not None:
            return self._limits.tokens
        return self._limits.seconds * self._load.tokens_per_s if self._load.tokens_per_s else math.inf

    @property
    def seconds(self) -> float:
        """How long the engine needs for the queue; 0 if nobody knows."""
        return self.tokens / self._load.tokens_per_s if self._load.tokens_per_s else 0.0

    @property
    def _unseen_run_at_once(self) -> bool:
        """Whether the engine has slots and blocks for all that it has been sent since its last news: that is no queue,
        and a long prompt turns nobody away while its first step runs."""
        load = self._load
        return (
            not (load.waiting or load.paused or self._held)
            and self._unseen_sequences <= self._limits.slots - load.running
            and self._unseen_tokens <= load.free_blocks * load.block_size
        )

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
        """Let a request of one tenant into the queue, as a whole or not at all.

        Args:
            adds: Its sequences, each prompt's first one with its forks, the others without.
            continuing: It belongs to a request that was let in before, and is let in whatever the queue.

        Raises:
            OverloadedError: The queue would be too long.
        """
        expected = self._load.expected_output
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
            self._await(add, of_prompt)

    def check(self, tenant: str, sequences: int, tokens: float) -> None:
        """Refuse what `enter` would refuse, as far as is known of it: before there are Adds, that is less than all.

        Raises:
            OverloadedError: The queue would be too long.
        """
        most = math.inf if self._limits.requests is None else self._limits.requests
        if not _has_room(self.sequences, sequences, most, tenant, self._own_sequences):
            self._refuse("requests")
        if not _has_room(self.tokens, tokens, self.max_tokens, tenant, self._own_tokens):
            self._refuse("tokens")

    def _await(self, add: Add, tokens: int) -> None:
        """The engine's load does not include this one yet."""
        self._forget_unseen(add.last_id)
        self._unseen[add.last_id] = 1 + len(add.forks), tokens
        self._unseen_sequences += 1 + len(add.forks)
        self._unseen_tokens += tokens

    def _forget_unseen(self, last_id: int) -> None:
        sequences, tokens = self._unseen.pop(last_id, (0, 0))
        self._unseen_sequences -= sequences
        self._unseen_tokens -= tokens

    def _release(self, sequences: Collection[int]) -> None:
        for sequence in self._held.keys() & sequences if self._held else ():
            self._held_tokens -= self._held.pop(sequence)

    def _refuse(self, limit: Limit) -> None:
        self._rejections[limit] += 1
        retry = min(MAX_RETRY_S, max(1, math.ceil(self.seconds)))
        raise OverloadedError(
            f"The server has more requests than it can answer soon: {self.sequences} wait. "
            f"Send the request again in {retry} s.",
            retry_after_s=retry,
        )


def _has_room(queued: int, more: float, most: float, tenant: str, own: Counter[str]) -> bool:
    """Whether a tenant's request for `more` may join a queue that has `queued`, of which `own` is known by tenant."""
    if not queued or queued + more <= most:
        return True
    if queued + more > OVERFLOW * most:
        return False
    if not own[tenant]:
        return True
    of_tenant = own[tenant] * max(1.0, queued / own.total())
    return of_tenant + more <= most / max(2, len(own))
