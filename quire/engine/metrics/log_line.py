"""The periodic log line about throughput and load; none while the server is idle. Its interval is also the rates'."""

from __future__ import annotations

from typing import NamedTuple

from quire.engine.metrics.stats import Stats
from quire.foundation.messages.from_engine import Load


class StatsLogLine:
    """Reports what one engine has done since the last line.

    Args:
        named: Whether the line begins with the engine's number, because there are several.
    """

    def __init__(self, stats: Stats, now: float, *, named: bool = False) -> None:
        self._name = f"engine {stats.engine}: " if named else ""
        self._stats = stats
        self._then = now
        self._prompt, self._generated = stats.prompt_tokens, stats.generation_tokens
        self._queries, self._hits = stats.load.prefix_queries, stats.load.prefix_hits
        self._drafts = _Drafts.of(stats.load)

    def since_last(self, now: float) -> str | None:
        """The line, or None when there was and is no work. Renews the rates in Stats."""
        stats, load, seconds = self._stats, self._stats.load, max(now - self._then, 1e-9)
        prompt, generated = stats.prompt_tokens - self._prompt, stats.generation_tokens - self._generated
        queries, hits = load.prefix_queries - self._queries, load.prefix_hits - self._hits
        self._then, self._prompt, self._generated = now, stats.prompt_tokens, stats.generation_tokens
        self._queries, self._hits = load.prefix_queries, load.prefix_hits
        before, self._drafts = self._drafts, _Drafts.of(load)
        stats.prompt_rate, stats.generation_rate = prompt / seconds, generated / seconds
        if not (prompt or generated or load.running or load.waiting):
            return None
        return (
            f"{self._name}prompt {stats.prompt_rate:.1f} tokens/s, generation {stats.generation_rate:.1f} tokens/s, "
            f"running {load.running}, waiting {load.waiting}, KV cache {stats.cache_usage:.1%}, "
            f"prefix cache hits {hits / queries if queries > 0 and hits > 0 else 0:.1%}, preemptions {load.preemptions}"
            f"{self._drafts.since(before)}"
        )


class _Drafts(NamedTuple):
    """The draft counts of a Load."""

    rows: int
    tokens: int
    accepted: int

    @classmethod
    def of(cls, load: Load) -> _Drafts:
        return cls(load.drafts, load.draft_tokens, sum(load.accepted_drafts))

    def since(self, before: _Drafts) -> str:
        """What to add to the line about drafts since then; empty if there were none."""
        rows, tokens, accepted = (now - then for now, then in zip(self, before, strict=True))
        if rows <= 0 or tokens <= 0:
            return ""
        return f", drafts accepted {accepted / tokens:.1%} ({1 + accepted / rows:.2f} tokens a row that had any)"
