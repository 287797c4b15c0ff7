"""What one API process counts: plain numbers that inner rooms fill and `quire.metrics.prometheus` shows.

Owns which event changes which number. Counters are exact to the token. Knows nothing about Prometheus or HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from quire.messages import STEP_TOKEN_BOUNDS, Add, End, EndReason, Heartbeat, Load
from quire.metrics.histogram import Histogram, steps_of_1_2_5
from quire.metrics.http import HttpCounts

FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
CHOICES = (1, 2, 5, 10, 20)
END_REASONS: tuple[EndReason, ...] = get_args(EndReason)


@dataclass
class Family:
    """The sequences of one prompt: how many have not ended, and the most tokens that one of them got."""

    first: int
    open: int
    most_tokens: int = 0


@dataclass
class Progress:
    """One sequence from its Add to its end, as far as times and counts go.

    Attributes:
        received: Tokens that the engine sent.
        delivered: Tokens that its reader has had, which are fewer where a stop string ends it.
        end: The engine's, if that ended it.
        over: Whether it is counted as ended.
    """

    prompt_tokens: int
    max_tokens: int
    choices: int
    arrival: float
    family: Family
    cached_tokens: int = 0
    first_token: float | None = None
    last_token: float = 0.0
    received: int = 0
    delivered: int = 0
    end: End | None = None
    over: bool = False


class Stats:
    """Counters, gauges and histograms of one server.

    Attributes:
        load: What the engine said last.
        prompt_tokens, cached_tokens: Of prompts that have brought a first token; cached ones were not computed for it.
        generation_tokens: Tokens that readers have had: as many as `usage` says.
        prompt_rate, generation_rate: Tokens a second in the last interval of `LoadLine`.
        ended: Sequences by reason.
        http: Answers to HTTP requests.
    """

    def __init__(self) -> None:
        self.load = Load()
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.prompt_rate = self.generation_rate = 0.0
        self.ended: dict[EndReason, int] = dict.fromkeys(END_REASONS, 0)
        self.http = HttpCounts()
        self._families: dict[int, Family] = {}  # by the id of the first sequence
        self.size(max_model_len=1)

    def size(self, max_model_len: int) -> None:
        """Set the scale of token counts, before the first request."""
        lengths = steps_of_1_2_5(max_model_len)
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.inter_token_s = Histogram(TOKEN_S)
        self.mean_token_s = Histogram(TOKEN_S)
        self.whole_s = Histogram(REQUEST_S)
        self.queued_s = Histogram(REQUEST_S)
        self.inference_s = Histogram(REQUEST_S)
        self.prefill_s = Histogram(REQUEST_S)
        self.decode_s = Histogram(REQUEST_S)
        self.prompt_lengths = Histogram(lengths)
        self.computed_lengths = Histogram(lengths)
        self.output_lengths = Histogram(lengths)
        self.most_tokens = Histogram(lengths)
        self.max_tokens = Histogram(lengths)
        self.choices = Histogram(CHOICES)
        self.step_tokens = Histogram(STEP_TOKEN_BOUNDS)

    @property
    def cache_usage(self) -> float:
        """Share of the KV blocks in use."""
        return 1 - self.load.free_blocks / self.load.num_blocks if self.load.num_blocks else 0.0

    @property
    def host_usage(self) -> float:
        """Share of the swap space in use."""
        return 1 - self.load.free_host_blocks / self.load.num_host_blocks if self.load.num_host_blocks else 0.0

    @property
    def cache_waste(self) -> float:
        """Share of the tokens that would fit into the KV blocks in use, but are not written."""
        held = (self.load.num_blocks - self.load.free_blocks) * self.load.block_size
        return self.load.unwritten_tokens / held if held else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the tokens looked up in the prefix cache that were there."""
        return self.load.prefix_hits / self.load.prefix_queries if self.load.prefix_queries else 0.0

    def heard(self, beat: Heartbeat) -> None:
        """What the engine says of itself, once a second."""
        self.load = beat.load
        if beat.step_tokens:
            self.step_tokens.take_over(beat.step_tokens, beat.step_tokens_sum)

    def began(self, add: Add) -> Progress:
        """A sequence goes to the engine."""
        params = add.sampling
        first = add.id if add.fork_of is None else add.fork_of
        family = self._families.setdefault(first, Family(first, params.n))
        return Progress(add.prompt_len, params.max_tokens or 0, params.n, add.arrival, family)

    def gained(self, progress: Progress, tokens: int, now: float, cached: int = 0) -> None:
        """A step brought tokens to a sequence; its first ones say how much of the prompt was `cached`."""
        if not tokens:
            return
        if progress.first_token is None:
            progress.first_token = now
            progress.cached_tokens = cached
            self.prompt_tokens += progress.prompt_tokens
            self.cached_tokens += cached
            self.first_token_s.observe(now - progress.arrival)
        else:
            self.inter_token_s.observe(now - progress.last_token)
        progress.last_token = now
        progress.received += tokens

    def delivered(self, progress: Progress, tokens: int) -> None:
        """The reader has had that many more."""
        progress.delivered += tokens
        self.generation_tokens += tokens

    def finished(self, progress: Progress, reason: EndReason, now: float) -> None:
        """The reader has had the end of a sequence, or wants no more of it. Only the first call counts."""
        if progress.over:
            return
        progress.over = True
        self.ended[reason] += 1
        self.whole_s.observe(now - progress.arrival)
        self.prompt_lengths.observe(progress.prompt_tokens)
        self.output_lengths.observe(progress.delivered)
        self.max_tokens.observe(progress.max_tokens)
        if progress.first_token is not None:
            self.computed_lengths.observe(progress.prompt_tokens - progress.cached_tokens)
            if progress.received > 1:
                self.mean_token_s.observe((progress.last_token - progress.first_token) / (progress.received - 1))
        if (end := progress.end) is not None:
            self.queued_s.observe(end.queued_s)
            self.inference_s.observe(end.prefill_s + end.decode_s)
            self.prefill_s.observe(end.prefill_s)
            self.decode_s.observe(end.decode_s)
        self._leave(progress)

    def _leave(self, progress: Progress) -> None:
        """The last sequence of a prompt is counted for all of them."""
        family = progress.family
        family.open -= 1
        family.most_tokens = max(family.most_tokens, progress.delivered)
        if family.open == 0:
            self.most_tokens.observe(family.most_tokens)
            self.choices.observe(progress.choices)
            del self._families[family.first]
