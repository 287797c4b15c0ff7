"""The periodic log line about throughput and load; none while the server is idle. Its interval is also the rates'."""

from __future__ import annotations

from typing import NamedTuple

from quire.engine.metrics.stats import Stats


class StatsLogLine:
    """Reports what one engine has done since the last line, which begins with its number if it is `named`."""

    def __init__(self, stats: Stats, now: float, *, named: bool = False) -> None:
        self._name = f"engine {stats.engine}: " if named else ""
        self._stats = stats
        self._then = now
        self._counters = _Counters.of(stats)

    def since_last(self, now: float) -> str | None:
        """The line, or None when there was and is no work. Renews the rates in Stats."""
        stats, load, seconds = self._stats, self._stats.load, max(now - self._then, 1e-9)
        before, self._counters, self._then = self._counters, _Counters.of(stats), now
        gained = _Counters(*(now - then for now, then in zip(self._counters, before, strict=True)))
        stats.prompt_rate, stats.generation_rate = gained.prompt / seconds, gained.generated / seconds
        if not (gained.prompt or gained.generated or load.running or load.waiting):
            return None
        hit_rate = gained.hits / gained.queries if gained.queries > 0 and gained.hits > 0 else 0
        line = (
            f"{self._name}prompt {stats.prompt_rate:.1f} tokens/s, generation {stats.generation_rate:.1f} tokens/s, "
            f"running {load.running}, waiting {load.waiting}, KV cache {stats.cache_usage:.1%}, "
            f"prefix cache hits {hit_rate:.1%}, preemptions {load.preemptions}"
        )
        if gained.drafts <= 0 or gained.draft_tokens <= 0:
            return line
        tokens_a_row = 1 + gained.accepted / gained.drafts
        accepted = gained.accepted / gained.draft_tokens
        return f"{line}, drafts accepted {accepted:.1%} ({tokens_a_row:.2f} tokens a row that had any)"


class _Counters(NamedTuple):
    """Counters of an engine."""

    prompt: int
    generated: int
    queries: int
    hits: int
    drafts: int
    draft_tokens: int
    accepted: int

    @classmethod
    def of(cls, stats: Stats) -> _Counters:
        load = stats.load
        prefix, drafts = (load.prefix_queries, load.prefix_hits), (load.drafts, load.draft_tokens)
        return cls(stats.prompt_tokens, stats.generation_tokens, *prefix, *drafts, sum(load.accepted_drafts))
