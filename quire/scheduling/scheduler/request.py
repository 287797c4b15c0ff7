"""One sequence inside the engine: its tokens and three lengths, from which the rest is derived.

Knows nothing about other requests (but the one it forks from), blocks being scarce, or how a plan is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.foundation.messages.from_engine import EXPECTED_OUTPUT, End, EndReason
from quire.foundation.messages.to_engine import Add
from quire.foundation.messages.workers import Vector
from quire.scheduling.kvcache.block_hashes import BlockHashes
from quire.scheduling.kvcache.block_table import BlockTable
from quire.scheduling.scheduler.lengths import Lengths
from quire.scheduling.scheduler.media_positions import shift_behind
from quire.scheduling.scheduler.repetition import RepetitionDetector

_MIN_LEARNING_RATE = 1 / 64


@dataclass
class HeldStates:
    """What a request holds of the pool of states; 0 stands for none.

    Attributes:
        current: The state that its steps read and write.
        source: The checkpoint that `current` begins as, when it is admitted.
        checkpoints: (length, state) behind its first `length` tokens, ascending; not in the cache yet.
        marks: (length, state), where a checkpoint is made as soon as the sequence passes this length. Drafts may take
            it there in a step in flight.
        fork: The state behind all of its prompt but the last token.
        forks: How many requests wait to begin with `fork`.
        forks_from: The states of the request that counts this one among its `forks`.
    """

    current: int = 0
    source: int = 0
    checkpoints: list[tuple[int, int]] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)
    fork: int = 0
    forks: int = 0
    forks_from: HeldStates | None = None


class _Column:
    """A request's entry in one of the columns of Lengths, as an attribute of the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, request: Request, owner: type) -> int:
        return int(getattr(request._lengths, self._name)[request.index])

    def __set__(self, request: Request, value: int) -> None:
        getattr(request._lengths, self._name)[request.index] = value


class Request:
    """A sequence that is waiting, running or finished.

    It has three lengths in tokens: `computed` ≤ `planned` ≤ `len(tokens) + in_flight_tokens`. A request moves forward
    whenever the second is less than the third; prompts, chunks and single tokens are only different values of the
    difference. Tokens that plans in flight will sample are counted by their upper bound; when a step brings fewer,
    `planned` and `in_flight_tokens` fall together. The lengths are entries of `Lengths`, where `Step` moves all
    requests of a step at once.

    Attributes:
        planned: Tokens computed by all plans, processed or in flight, at most.
        computed: Tokens computed by plans whose results are processed.
        in_flight_tokens: Tokens that plans in flight will sample, at most.
        host_bound: Whether the request is planned only when the host knows all its tokens.
        tokens: Prompt and output, as far as the host knows them.
        awaits: What it needs before it can be admitted and does not have yet, such as a compiled grammar.
        parent: The request it forks from: it waits to share all of the parent's prompt but the last token.
        queue_key: Its place among all requests; the lowest goes first. WaitingQueue changes it when it is admitted.
        slot: Its slot in the device's slot table while running.
        prompt_step: The step that reached its prompt's end; 0 before.
        swapped: Whether its blocks are on the host.
        states: Its states; None in models without states.
        num_cached_tokens: Prompt tokens that were in the prefix cache when it was first admitted.
        prompt_logprobs_planned: How many of the prompt's log probabilities are in plans so far. All of them, its length
            less 1, if they are not wanted.
        repetition: Watches its output for repetition, if that is wanted.
        rope_length: The length that its keys are rotated for, at least, in models with RopeLengthMode; in others, what
            images add to positions behind them, at most 0.
        adapter_slot: Its adapter's slot on the device, from 1; 0: none yet, or no adapter.
        loads: How often it has awaited blocks from a tier since it last ran.
        near_tokens: Tokens that the device had when it first did; None: it did not.
        preemptions: How often it was preempted, in either way.
        pools: Whether it is pooled in place of sampled. Then `limit` is one more than its prompt, so that all of it is
            computed, and no step samples it.
        skips_cache: Whether it computes its whole prompt, whatever is cached.
        vectors: What steps have brought of a pooled request since it was last computed from the start.
        ended: Why it is over, or None.
    """

    planned, computed, in_flight_tokens, limit = _Column(), _Column(), _Column(), _Column()
    host_bound, max_drafts, masked, pools = _Column(), _Column(), _Column(), _Column()

    __slots__ = (
        "_former_hashes",
        "_lengths",
        "adapter_slot",
        "add",
        "admitted_at",
        "awaits",
        "block_hashes",
        "ended",
        "error",
        "first_token_at",
        "id",
        "index",
        "loads",
        "near_tokens",
        "num_cached_tokens",
        "parent",
        "preemptions",
        "prompt_logprobs_planned",
        "prompt_step",
        "queue_key",
        "repetition",
        "rope_length",
        "skips_cache",
        "slot",
        "states",
        "stop_ids",
        "swapped",
        "table",
        "tokens",
        "vectors",
    )  # fmt: skip

    def __init__(
        self, add: Add, table: BlockTable, block_hashes: BlockHashes, queue_key: tuple[float, int], lengths: Lengths
    ) -> None:
        self.add = add
        self.id = add.id
        self.tokens = add.tokens  # shared with its forks until it is admitted
        self.stop_ids = frozenset(add.stop_ids)
        detection = add.sampling.repetition_detection
        self.repetition = RepetitionDetector(detection, add.tokens[add.prompt_len :]) if detection else None
        self.table = table
        self.block_hashes = block_hashes
        self._former_hashes: list[BlockHashes] = []
        self.queue_key = queue_key
        self._lengths = lengths
        most = 1 if add.pooling else add.sampling.max_tokens or 0
        self.index = lengths.allocate(len(add.tokens), add.prompt_len, add.prompt_len + most)
        self.pools = add.pooling is not None
        self.vectors: list[Vector] = []
        self.skips_cache = bool(add.sampling.skip_reading_prefix_cache)
        self.slot: int | None = None
        self.awaits: set[str] = set()
        self.parent: Request | None = None
        self.prompt_step = 0
        self.swapped = False
        self.states: HeldStates | None = None
        self.num_cached_tokens: int | None = None
        self.rope_length = shift_behind(add.media) if add.media else 0
        self.adapter_slot = 0
        self.loads = 0
        self.near_tokens: int | None = None
        wanted = add.sampling.prompt_logprobs is not None and add.fork_of is None  # once for all that share the prompt
        self.prompt_logprobs_planned = 0 if wanted else add.prompt_len - 1
        self.preemptions = 0
        self.ended: EndReason | None = None
        self.error = ""
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None

    @property
    def output_len(self) -> int:
        """Output tokens that the host knows."""
        return len(self.tokens) - self.add.prompt_len

    @property
    def needs_history(self) -> bool:
        """Whether sampling or drafting needs the request's earlier tokens besides its logits."""
        add = self.add
        rules = add.sampling.penalizes or add.bad_words or add.transcript
        return bool(rules or self.host_bound or self.max_drafts)

    @property
    def reads_cache(self) -> bool:
        """Whether the request may use the prefix cache. It may not while its prompt's log probabilities are wanted:
        cached tokens have no logits."""
        return not self.skips_cache and self.prompt_logprobs_planned >= self.add.prompt_len - 1

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the next plan could compute; 0 when its end by count is already planned."""
        length = len(self.tokens) + self.in_flight_tokens
        return length - self.planned if length < self.limit else 0

    def set_computed(self, length: int) -> None:
        """Set how many tokens are in the request's blocks already, when it is admitted."""
        if self.tokens is self.add.tokens:
            self.tokens = list(self.tokens)
        self.computed = self.planned = length
        if self.num_cached_tokens is None:
            self.num_cached_tokens = min(length, self.add.prompt_len)

    def reset_computed(self) -> None:
        """Forget what was computed: all known tokens will be computed again."""
        lengths, index = self._lengths, self.index
        lengths.computed[index] = lengths.planned[index] = lengths.allocated[index] = 0
        lengths.epoch[index] += 1
        self.prompt_step = 0
        if self.vectors:
            self.vectors = []

    def rehash(self, salt: str) -> None:
        """Give the request's blocks other hashes from now on, under another salt."""
        self._former_hashes.append(self.block_hashes)
        self.block_hashes = self.block_hashes.salted(salt)

    def invalidate(self) -> None:
        """Take all of the request's blocks out of the prefix cache, because what was computed is broken."""
        for hashes in (self.block_hashes, *self._former_hashes):
            self.table.invalidate(hashes.hashed)

    def end(self, reason: EndReason, error: str = "") -> None:
        """End the request. The caller releases what it holds."""
        assert self.ended is None, f"request {self.id} ended twice"
        self.ended, self.error = reason, error

    def last_message(self, now: float) -> End:
        """The request's one End, with how long it waited, computed its prompt and decoded."""
        assert self.ended is not None
        admitted = now if self.admitted_at is None else self.admitted_at
        first = now if self.first_token_at is None else self.first_token_at
        # The chunks of a text that ended early have vectors of their tokens, which are not what was asked for.
        vectors = self.vectors if self.ended == "stop" else []
        return End(
            id=self.id,
            reason=self.ended,
            message=self.error,
            queued_s=max(0.0, admitted - self.add.arrival),
            prefill_s=max(0.0, first - admitted),
            decode_s=max(0.0, now - first),
            preemptions=self.preemptions,
            cached_tokens=self.num_cached_tokens or 0,
            vector=b"".join(vector.data for vector in vectors),
            vector_shape=_joined_shape(vectors),
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.id}, slot={self.slot}, computed={self.computed}, planned={self.planned}, "
            f"known={len(self.tokens)}, in_flight={self.in_flight_tokens}, swapped={self.swapped}, ended={self.ended})"
        )


def _joined_shape(vectors: Sequence[Vector]) -> list[int]:
    """The shape of vectors that are put one behind the other; [] for none."""
    if len(vectors) <= 1:
        return vectors[0].shape if vectors else []
    return [sum(vector.shape[0] for vector in vectors), *vectors[0].shape[1:]]


class ResourcePool(Protocol):
    """Slots, blocks or whatever else there is a limited number of, and requests hold."""

    def release(self, request: Request) -> None:
        """Take back what a request holds: all of it if it is over (`request.ended`), and what it does not need while it
        waits if it was preempted."""


class ExpectedOutput:
    """How long outputs of waiting sequences are expected to be: a running mean over sequences that ended by themselves.
    The first guess counts as one of them.
    """

    def __init__(self) -> None:
        self.tokens = float(EXPECTED_OUTPUT)
        self._seen = 1

    def learn(self, tokens: int) -> None:
        """A sequence has ended with so many output tokens."""
        self._seen += 1
        self.tokens += max(_MIN_LEARNING_RATE, 1 / self._seen) * (tokens - self.tokens)
