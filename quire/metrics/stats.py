"""What one API process counts: plain numbers that inner rooms fill and `quire.metrics.prometheus` shows.

Owns which event changes which number. Counters are exact to the token. Knows nothing about Prometheus or HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.messages import Add, End, EndReason, Load
from quire.metrics.histogram import Histogram, steps_of_1_2_5

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
END_REASONS: tuple[EndReason, ...] = ("stop", "length", "abort", "error", "repetition")


@dataclass
class Progress:
    """One sequence from its Add to its end, as far as times and counts go."""

    prompt_tokens: int
    max_tokens: int
    choices: int
    arrival: float
    first_token: float | None = None
    last_token: float = 0.0
    tokens: int = 0


class Stats:
    """Counters, gauges and histograms of one server."""

    def __init__(self) -> None:
        self.load = Load()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.ended: dict[EndReason, int] = dict.fromkeys(END_REASONS, 0)
        self.size(max_model_len=1)

    def size(self, max_model_len: int) -> None:
        """Set the scale of token counts, before the first request."""
        lengths = steps_of_1_2_5(max_model_len)
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.inter_token_s = Histogram(TOKEN_S)
        self.mean_token_s = Histogram(TOKEN_S)
        self.whole_s = Histogram(REQUEST_S)
        self.queued_s = Histogram(REQUEST_S)
        self.prefill_s = Histogram(REQUEST_S)
        self.decode_s = Histogram(REQUEST_S)
        self.prompt_lengths = Histogram(lengths)
        self.output_lengths = Histogram(lengths)
        self.max_tokens = Histogram(lengths)
        self.choices = Histogram(CHOICES)

    @property
    def cache_usage(self) -> float:
        """Share of the KV blocks in use."""
        return 1 - self.load.free_blocks / self.load.num_blocks if self.load.num_blocks else 0.0

    def began(self, add: Add) -> Progress:
        """A sequence goes to the engine."""
        return Progress(add.prompt_len, add.sampling.max_tokens or 0, add.sampling.n, add.arrival)

    def gained(self, progress: Progress, tokens: int, now: float) -> None:
        """A step brought tokens to a sequence."""
        if not tokens:
            return
        if progress.first_token is None:
            progress.first_token = now
            self.prompt_tokens += progress.prompt_tokens
            self.first_token_s.observe(now - progress.arrival)
        else:
            self.inter_token_s.observe(now - progress.last_token)
        progress.last_token = now
        progress.tokens += tokens
        self.generation_tokens += tokens

    def finished(self, progress: Progress, reason: EndReason, now: float, end: End | None = None) -> None:
        """A sequence ended, by the engine's `end` or, with None, because nobody wants more of it."""
        self.ended[reason] += 1
        self.whole_s.observe(now - progress.arrival)
        self.prompt_lengths.observe(progress.prompt_tokens)
        self.output_lengths.observe(progress.tokens)
        self.max_tokens.observe(progress.max_tokens)
        self.choices.observe(progress.choices)
        if progress.first_token is not None and progress.tokens > 1:
            self.mean_token_s.observe((progress.last_token - progress.first_token) / (progress.tokens - 1))
        if end is not None:
            self.queued_s.observe(end.queued_s)
            self.prefill_s.observe(end.prefill_s)
            self.decode_s.observe(end.decode_s)
