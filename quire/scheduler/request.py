"""One sequence inside the engine: its tokens and three lengths, everything else derived.

Knows nothing about other requests (but the one it forks from), blocks being scarce, or how a plan is encoded.
"""

from __future__ import annotations

from quire.kvcache.prefix import PrefixHashes
from quire.kvcache.table import BlockTable
from quire.messages import Add, End, EndReason


class Request:
    """A sequence that is waiting, running or finished.

    The lengths, in tokens: `computed` (settled on the device) ≤ `planned` (also by plans in flight) ≤ `length` (known
    tokens and those that plans in flight will draw). A request moves forward whenever `planned < length`: prompts,
    chunks and single tokens are only different values of the difference.

    Attributes:
        tokens: Prompt and output, as far as the host knows them.
        hashes: Of its full blocks.
        drawing: Tokens that plans in flight will draw.
        slot: Its place in the device's slot table while running.
        parent: The request whose prompt blocks it waits to share.
        prompt_step: The step that reached its prompt's end; 0 before.
        swapped: Whether its blocks are on the host.
        cached: Prompt tokens that it found computed when it first ran.
        epoch: Counts recomputations: rows planned in an earlier epoch no longer say what is computed.
        preemptions: How often it was put back, in either way.
        ended: Why it is over, or None.
    """

    __slots__ = (
        "add", "admitted_at", "cached", "computed", "drawing", "ended", "epoch", "error", "first_token_at", "hashes",
        "parent", "planned", "preemptions", "prompt_step", "rank", "slot", "swapped", "table", "tokens",
    )  # fmt: skip

    def __init__(self, add: Add, table: BlockTable, hashes: PrefixHashes, rank: tuple[float, int]) -> None:
        """
        Args:
            rank: Its place among all requests; the lowest goes first.
        """
        self.add = add
        self.tokens = list(add.tokens)
        self.table = table
        self.hashes = hashes
        self.rank = rank
        self.computed = 0
        self.planned = 0
        self.drawing = 0
        self.slot: int | None = None
        self.parent: Request | None = None
        self.prompt_step = 0
        self.swapped = False
        self.cached: int | None = None
        self.epoch = 0
        self.preemptions = 0
        self.ended: EndReason | None = None
        self.error = ""
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None

    @property
    def id(self) -> int:
        """As given by the client."""
        return self.add.id

    @property
    def length(self) -> int:
        """Tokens when every plan in flight has settled without an early end."""
        return len(self.tokens) + self.drawing

    @property
    def output_len(self) -> int:
        """Output tokens the host knows."""
        return len(self.tokens) - self.add.prompt_len

    @property
    def limit(self) -> int:
        """Length at which it ends by count."""
        return self.add.prompt_len + (self.add.sampling.max_tokens or 0)

    @property
    def ahead(self) -> int:
        """Tokens it could move forward by now; 0 when its end by count is already planned."""
        return self.length - self.planned if self.length < self.limit else 0

    def full_hashes(self) -> list[bytes]:
        """Hashes of its blocks that are full of known, planned tokens."""
        return self.hashes.upto(self.tokens, min(self.planned, len(self.tokens)))

    def start_at(self, length: int) -> None:
        """The first `length` tokens stand in its blocks already."""
        self.computed = self.planned = length
        if self.cached is None:
            self.cached = min(length, self.add.prompt_len)

    def move(self, count: int, step: int) -> bool:
        """Plan `count` more tokens in a step; whether that reaches the end, so that a token is drawn."""
        self.planned += count
        assert count > 0 and self.computed <= self.planned <= self.length, self
        if not self.prompt_step and self.planned >= self.add.prompt_len:
            self.prompt_step = step
        draws = self.planned == self.length
        self.drawing += draws
        return draws

    def restart(self) -> None:
        """Forget what is computed: it will be computed again, from its known tokens."""
        self.computed = self.planned = 0
        self.prompt_step = 0
        self.epoch += 1

    def settle(self, count: int, epoch: int, drew: bool, token: int | None) -> None:
        """A plan's row has run: `count` tokens are computed, and maybe one was drawn (None: it failed)."""
        if epoch == self.epoch:
            self.computed += count
        if drew:
            self.drawing -= 1
            if token is not None:
                self.tokens.append(token)
                self._end_by(token)
        assert self.computed <= self.planned <= self.length, self

    def end(self, reason: EndReason, error: str = "") -> None:
        """It is over; the caller takes its slot and blocks back."""
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

    def _end_by(self, token: int) -> None:
        if token in self.add.stop_ids and self.output_len >= self.add.sampling.min_tokens:
            self.end("stop")
        elif len(self.tokens) >= self.limit:
            self.end("length")
