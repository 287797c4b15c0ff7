"""The queues of the engines: which engine a prompt goes to, and which requests are turned away.

An engine says how long its queue is (`Load`); what this process has sent since is added, because the engine may not
have it yet. Each API process sees the others' requests a step late, so the queue may become a little longer than its
limit. Tenants are the engine's business, which serves them in turns.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.engine.metrics.stats import Limit
from quire.errors import OverloadedError
from quire.foundation.clock import Clock
from quire.foundation.config import SchedulerConfig
from quire.foundation.config.scheduler import MAX_QUEUE_TIME, OVERLOAD_QUEUE_TIME
from quire.foundation.messages.from_engine import Load
from quire.foundation.messages.to_engine import Add
from quire.scheduling.kvcache.block_hashes import BlockHashes
from quire.serving.api.session.overload import OverloadDetector
from quire.serving.replica_chooser import MAX_BLOCKS, ReplicaChooser, ReplicaLoad

_UNKNOWN_BLOCKS = 2**20
"""Supposed of an engine that has not said how many blocks it has."""
FULL_SHARE = 1 / 16
"""A queue counts as full at the latest when less than this share of its limit is left."""
MAX_RETRY_S = 3_600
_LEARNING_RATE = 1 / 16


class EngineQueue:
    """The queue of an engine that runs `slots` sequences at once; `load` is what the engine said last."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.load = Load()
        self._unseen = OrderedDict[int, tuple[int, int]]()  # Adds after `load`, by last id: sequences, tokens
        self._unseen_sequences = self._unseen_tokens = 0

    def observe(self, load: Load, last_add: int) -> None:
        """Take over what the engine has to do, up to the Add `last_add` of this process."""
        self.load = load
        while self._unseen and (first := next(iter(self._unseen))) <= last_add:
            self._forget_unseen(first)

    def restart(self) -> None:
        """Another engine takes over: it has been sent nothing yet, and is as fast as the one before."""
        before = self.load
        self.load = Load(tokens_per_s=before.tokens_per_s, expected_output=before.expected_output)
        self._unseen.clear()
        self._unseen_sequences = self._unseen_tokens = 0

    def expect(self, add: Add) -> None:
        """Count an Add that goes to the engine, whose load does not include it yet."""
        self._forget_unseen(add.last_id)
        tokens = add.queued_tokens(self.load.expected_output)
        self._unseen[add.last_id] = 1 + len(add.forks), tokens
        self._unseen_sequences += 1 + len(add.forks)
        self._unseen_tokens += tokens

    @property
    def sequences(self) -> int:
        """Sequences in the queue. What was sent last finds free slots first."""
        free = 0 if self.load.waiting else self._slots - self.load.running
        return self.load.waiting + max(0, self._unseen_sequences - free)

    @property
    def open_sequences(self) -> int:
        """Sequences that run or wait."""
        return self.load.running + self.load.waiting + self._unseen_sequences

    @property
    def tokens(self) -> int:
        """Tokens that are to be computed for the queue; see `Add.queued_tokens`."""
        unseen = 0 if self._unseen_run_at_once else self._unseen_tokens
        return self.load.queued_tokens + unseen

    @property
    def _unseen_run_at_once(self) -> bool:
        """Whether the engine has room for all that it was sent since its last news: then that is no queue."""
        load = self.load
        return (
            not (load.waiting or load.paused)
            and self._unseen_sequences <= self._slots - load.running
            and self._unseen_tokens <= load.free_blocks * load.block_size
        )

    def _forget_unseen(self, last_id: int) -> None:
        sequences, tokens = self._unseen.pop(last_id, (0, 0))
        self._unseen_sequences -= sequences
        self._unseen_tokens -= tokens


class Placement:
    """Places prompts on engines, by their queues and what was sent lately. `block_size` is in tokens."""

    def __init__(self, queues: Sequence[EngineQueue], block_size: int, clock: Clock) -> None:
        self._queues = queues
        self._block_size = block_size
        self._chooser = ReplicaChooser(len(queues), block_size, clock)

    def blocks(self, add: Add) -> list[bytes]:
        """The hash chain of a prompt, as far as it matters; empty where there is nothing to choose."""
        if len(self._queues) == 1:
            return []
        adapter = add.adapter.digest if add.adapter else ""
        source = add.source.digest if add.source else b""
        hashes = BlockHashes(self._block_size, add.cache_salt, adapter=adapter, media=add.media, source=source)
        return hashes.hash_up_to(add.tokens, min(len(add.tokens), MAX_BLOCKS * self._block_size))

    def place(self, add: Add, blocks: Sequence[bytes], able: Sequence[bool]) -> int:
        """The number of the engine for a prompt with these `blocks`, which its queue expects from now on. Some engine
        is able."""
        number = 0
        if len(self._queues) > 1:
            loads = [_load(queue) if can else None for queue, can in zip(self._queues, able, strict=True)]
            mean = sum(queue.load.expected_output for queue in self._queues) / len(self._queues)
            output = min(add.sampling.max_tokens or 0, mean) * (1 + len(add.forks))
            number = self._chooser.choose(loads, blocks, len(add.tokens), output)
        self._queues[number].expect(add)
        return number

    def forget(self, engine: int) -> None:
        """Note that an engine was started again, with an empty cache."""
        self._chooser.forget(engine)


def _load(queue: EngineQueue) -> ReplicaLoad:
    load = queue.load
    if not load.num_blocks:
        return ReplicaLoad(queue.open_sequences, queue.tokens, _UNKNOWN_BLOCKS, _UNKNOWN_BLOCKS)
    return ReplicaLoad(queue.open_sequences, queue.tokens, load.free_blocks, load.num_blocks)


@dataclass(frozen=True)
class QueueLimits:
    """How long the queue may be, in sequences and tokens; None for any number of sequences, and for the tokens that are
    worked off within `seconds`, or within `overload_seconds` under overload. A request that meets an empty queue is
    always let in."""

    requests: int | None
    tokens: int | None
    seconds: float
    overload_seconds: float
    slots: int

    @classmethod
    def of(cls, config: SchedulerConfig) -> QueueLimits:
        """The limits that are configured."""
        usual, overload = config.max_queue_time, config.overload_queue_time
        if overload is None:
            overload = OVERLOAD_QUEUE_TIME if usual is None else usual
        return cls(
            config.max_queued_requests,
            config.max_queued_tokens,
            MAX_QUEUE_TIME if usual is None else usual,
            overload,
            config.max_num_seqs or 1,
        )


class AdmissionLimit:
    """Decides which requests one API process turns away, and counts these in `rejections`, by reason.

    Args:
        open_requests: Returns how many requests of this process have not ended.
    """

    def __init__(
        self,
        limits: QueueLimits,
        queues: Sequence[EngineQueue],
        rejections: dict[Limit, int],
        clock: Clock,
        open_requests: Callable[[], int],
    ) -> None:
        self._limits = limits
        self._open_requests = open_requests
        self._queues = queues
        self._rejections = rejections
        self._overload = OverloadDetector(clock)
        self._overloaded = False  # as of the last arrival
        self._usual_tokens = 0.0  # of a request that was let in, on average

    @property
    def sequences(self) -> int:
        """Sequences in the queue."""
        return sum(queue.sequences for queue in self._queues)

    @property
    def tokens(self) -> int:
        """Tokens that are to be computed for the queue; see `Add.queued_tokens`."""
        return sum(queue.tokens for queue in self._queues)

    @property
    def max_tokens(self) -> float:
        """Maximum number of tokens in the queue."""
        return min(self._usual_limit, self._overload_limit)

    @property
    def _usual_limit(self) -> float:
        limits, speed = self._limits, self._tokens_per_s
        if limits.tokens is not None:
            return limits.tokens
        return limits.seconds * speed if speed else math.inf

    @property
    def _overload_limit(self) -> float:
        speed = self._tokens_per_s
        return self._limits.overload_seconds * speed if self._overloaded and speed else math.inf

    @property
    def seconds(self) -> float:
        """How long the engines need for the queue; 0 if nobody knows."""
        speed = self._tokens_per_s
        return self.tokens / speed if speed else 0.0

    @property
    def _tokens_per_s(self) -> float:
        return sum(queue.load.tokens_per_s for queue in self._queues)

    def refuse_if_full(self, *, is_retry: bool = False) -> None:
        """Raises OverloadedError if the queue is full, before a request is read. This has to be cheap, or a flood takes
        the time of the requests that were let in. Who `is_retry` was turned away before: as long as all come back, no
        more is offered.

        The queue is full when it has no room for what requests brought lately on average, or for FULL_SHARE of its
        limit if that is less.
        """
        if is_retry:
            self._overload.came_back()
        self.check(1, min(self._usual_tokens, FULL_SHARE * self.max_tokens))

    def enter(self, adds: Sequence[Add]) -> None:
        """Let a request into the queue as a whole; raises OverloadedError if the queue would be too long."""
        expected = sum(queue.load.expected_output for queue in self._queues) / len(self._queues)
        tokens = sum(add.queued_tokens(expected) for add in adds if add.fork_of is None)
        self.check(len(adds), tokens)
        self._usual_tokens += _LEARNING_RATE * (tokens - self._usual_tokens)

    def check(self, sequences: int, tokens: float) -> None:
        """Raises OverloadedError if `enter` would, as far as the request is known before its Adds are made."""
        queues = self._queues
        self._overloaded = self._overload.arrived(
            self._open_requests(),
            min(queue.load.queue_delay_s for queue in queues),
            self.seconds,
        )
        most = self._limits.requests
        if most is not None and self.sequences and self.sequences + sequences > most:
            self._refuse("requests")
        queued = self.tokens
        # Under overload the queue is hardly ever empty: one larger than its limit is let in when it is half empty.
        limit = self._usual_limit if queued < self._overload_limit / 2 else self.max_tokens
        if queued and queued + tokens > limit:
            self._refuse("tokens")

    def _refuse(self, limit: Limit) -> None:
        self._rejections[limit] += 1
        self._overload.refused()
        retry = min(MAX_RETRY_S, max(1, math.ceil(self.seconds)))
        raise OverloadedError(
            f"The server has more requests than it can answer soon: {self.sequences} wait. "
            f"Send the request again in {retry} s.",
            retry_after_s=retry,
        )
