"""The periodic line about throughput and load; silent while nothing happens."""

from __future__ import annotations

from quire.metrics.stats import Stats


class LoadLine:
    """Says how much was done since it was last asked."""

    def __init__(self, stats: Stats, now: float) -> None:
        self._stats = stats
        self._then = now
        self._prompt, self._generated = stats.prompt_tokens, stats.generation_tokens

    def since_last(self, now: float) -> str | None:
        """The line, or None when there was and is no work."""
        stats, seconds = self._stats, max(now - self._then, 1e-9)
        prompt, generated = stats.prompt_tokens - self._prompt, stats.generation_tokens - self._generated
        self._then, self._prompt, self._generated = now, stats.prompt_tokens, stats.generation_tokens
        if not (prompt or generated or stats.load.running or stats.load.waiting):
            return None
        return (
            f"prompt {prompt / seconds:.1f} tokens/s, generation {generated / seconds:.1f} tokens/s, "
            f"running {stats.load.running}, waiting {stats.load.waiting}, KV cache {stats.cache_usage:.1%}, "
            f"preemptions {stats.load.preemptions}"
        )
