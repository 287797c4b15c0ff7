"""One sequence inside the engine: its tokens and three lengths, everything else derived.

Knows nothing about other requests (but the one it forks from), blocks being scarce, or how a plan is encoded.
"""

from __future__ import annotations

from quire.kvcache.prefix import PrefixHashes
from quire.kvcache.table import BlockTable
from quire.messages import Add, End, EndReason
from quire.scheduler.lengths import Lengths


class Request:
    """A sequence that is waiting, running or finished.

    The lengths, in tokens: `computed` (settled on the device) ≤ `planned` (also by plans in flight) ≤ `length` (known
    tokens and those that plans in flight will draw). A request moves forward whenever `planned < length`: prompts,
    chunks and single tokens are only different values of the difference. What plans in flight will draw is counted by
    its upper bound; when one settles with less, `planned` and `length` fall together. They stand in its row of
    `Lengths`, where `Step` moves all requests of a step at once.

    Attributes:
        tokens: Prompt and output, as far as the host knows them.
        row: Its row of lengths.
        hashes: Of its full blocks.
        slot: Its place in the device's slot table while running.
        prompt_step: The step that reached its prompt's end; 0 before.
        swapped: Whether its blocks are on the host.
        cached: Prompt tokens that it found computed when it first ran.
        scored: How far plans have looked at its prompt's log probabilities: the token at each position before this one
            is compared with the one behind it. The last has none behind it, so the prompt's length less 1 is all.
        counts_as: The length that its keys go by, in models whose keys depend on it; see KeysByLength.
        preemptions: How often it was put back, in either way.
        ended: Why it is over, or None.
    """

    __slots__ = (
        "_lengths", "_parent", "add", "admitted_at", "cached", "counts_as", "ended", "error", "first_token_at",
        "hashes", "id", "preemptions", "prompt_step", "rank", "row", "scored", "slot", "stop_ids", "swapped", "table",
        "tokens",
    )  # fmt: skip

    def __init__(
        self, add: Add, table: BlockTable, hashes: PrefixHashes, rank: tuple[float, int], lengths: Lengths
    ) -> None:
        """
        Args:
            rank: Its place among all requests; the lowest goes first.
            lengths: Where it takes a row.
        """
        self.add = add
        self.id = add.id
        self.tokens = add.tokens  # with its siblings, until it is admitted
        self.stop_ids = frozenset(add.stop_ids)
        self.table = table
        self.hashes = hashes
        self.rank = rank
        self._lengths = lengths
        self.row = lengths.take(len(add.tokens), add.prompt_len, add.prompt_len + (add.sampling.max_tokens or 0))
        self.slot: int | None = None
        self._parent: Request | None = None
        self.prompt_step = 0
        self.swapped = False
        self.cached: int | None = None
        self.counts_as = 0
        wanted = add.sampling.prompt_logprobs is not None and add.fork_of is None  # once for all that share the prompt
        self.scored = 0 if wanted else add.prompt_len - 1
        self.preemptions = 0
        self.ended: EndReason | None = None
        self.error = ""
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None

    @property
    def planned(self) -> int:
        """Tokens that plans, settled or in flight, have moved it forward by, at most."""
        return int(self._lengths.planned[self.row])

    @property
    def computed(self) -> int:
        """Tokens of these whose plans have settled."""
        return int(self._lengths.computed[self.row])

    @property
    def drawing(self) -> int:
        """Tokens that plans in flight will draw, at most."""
        return int(self._lengths.drawing[self.row])

    @property
    def limit(self) -> int:
        """The length at which it ends by count."""
        return int(self._lengths.limit[self.row])

    @property
    def output_len(self) -> int:
        """Output tokens the host knows."""
        return len(self.tokens) - self.add.prompt_len

    @property
    def parent(self) -> Request | None:
        """The request whose prompt blocks it waits to share: all of its prompt but the last token."""
        return self._parent

    @parent.setter
    def parent(self, value: Request | None) -> None:
        self._parent = value
        self._lengths.shared[self.row] = 0 if value is None else self.add.prompt_len - 1

    @property
    def host_bound(self) -> bool:
        """Whether it moves only when the host knows all its tokens."""
        return bool(self._lengths.held[self.row])

    @host_bound.setter
    def host_bound(self, value: bool) -> None:
        self._lengths.held[self.row] = value

    @property
    def drafts(self) -> int:
        """Most tokens that a read of it may gain beside the one it draws."""
        return int(self._lengths.drafts[self.row])

    @drafts.setter
    def drafts(self, value: int) -> None:
        self._lengths.drafts[self.row] = value

    @property
    def masked(self) -> bool:
        """Whether every read of it waits for a mask."""
        return bool(self._lengths.masked[self.row])

    @masked.setter
    def masked(self, value: bool) -> None:
        self._lengths.masked[self.row] = value

    @property
    def needs_history(self) -> bool:
        """Whether what it draws depends on its tokens in other ways than through the model."""
        return self.add.sampling.penalizes or bool(self.add.bad_words) or self.host_bound

    @property
    def reads_cache(self) -> bool:
        """Whether what others have computed serves it; logits of its prompt must be its own."""
        return not self.add.sampling.skip_reading_prefix_cache and self.scored >= self.add.prompt_len - 1

    @property
    def ahead(self) -> int:
        """Tokens it could move forward by now; 0 when its end by count is already planned."""
        length = len(self.tokens) + self.drawing
        return length - self.planned if length < self._lengths.limit[self.row] else 0

    def start_at(self, length: int) -> None:
        """It is admitted, and the first `length` tokens are in its blocks already."""
        if self.tokens is self.add.tokens:
            self.tokens = list(self.tokens)
        self._lengths.computed[self.row] = self._lengths.planned[self.row] = length
        if self.cached is None:
            self.cached = min(length, self.add.prompt_len)

    def restart(self) -> None:
        """Forget what is computed: it will be computed again, from its known tokens."""
        lengths, row = self._lengths, self.row
        lengths.computed[row] = lengths.planned[row] = lengths.room[row] = 0
        lengths.epoch[row] += 1
        self.prompt_step = 0

    def end(self, reason: EndReason, error: str = "") -> None:
        """It is over; the caller takes its slot, blocks and row back."""
        assert self.ended is None, f"request {self.id} ended twice"
        self.ended, self.error = reason, error

    def last_message(self, now: float) -> End:
        """Its one End, with how long each part of its life took."""
        assert self.ended is not None
        admitted = now if self.admitted_at is None else self.admitted_at
        first = now if self.first_token_at is None else self.first_token_at
        return End(
            id=self.id,
            reason=self.ended,
            message=self.error,
            queued_s=max(0.0, admitted - self.add.arrival),
            prefill_s=max(0.0, first - admitted),
            decode_s=max(0.0, now - first),
            preemptions=self.preemptions,
            cached_tokens=self.cached or 0,
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.id}, slot={self.slot}, computed={self.computed}, planned={self.planned}, "
            f"known={len(self.tokens)}, drawing={self.drawing}, swapped={self.swapped}, ended={self.ended})"
        )
