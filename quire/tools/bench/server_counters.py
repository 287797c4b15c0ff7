"""What a server counts itself, read from /metrics before and after: whether caches or drafts flattered the figures."""

from __future__ import annotations

from dataclasses import dataclass

from quire.foundation.http_client.answer_parser import HttpError
from quire.foundation.http_client.blocking_client import BlockingClient

_NAMES = {
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:num_preemptions_total": "preemptions",
}


@dataclass(frozen=True)
class ServerCounters:
    """Sums over all engines; None for what the server does not report."""

    prefix_queries: float | None = None
    prefix_hits: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    preemptions: float | None = None

    def since(self, before: ServerCounters) -> ServerCounters:
        """What was counted in between."""
        grown = {name: _grown(getattr(self, name), getattr(before, name)) for name in _NAMES.values()}
        return ServerCounters(**grown)

    @property
    def prefix_hit_rate(self) -> float | None:
        """Share of prompt tokens that came from the prefix cache."""
        return _share(self.prefix_hits, self.prefix_queries)

    @property
    def acceptance_rate(self) -> float | None:
        """Share of drafted tokens that were accepted."""
        return _share(self.accepted, self.drafted)


def read_counters(http: BlockingClient) -> ServerCounters:
    """What /metrics says now; nothing where there is no such page."""
    try:
        status, page = http.ask("GET", "/metrics")
    except HttpError:
        return ServerCounters()
    found: dict[str, float] = {}
    for line in page.decode(errors="replace").splitlines() if status == 200 else ():
        name = _NAMES.get(line.partition("{")[0].partition(" ")[0])
        if name is not None:
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return ServerCounters(**found)


def _grown(after: float | None, before: float | None) -> float | None:
    return None if after is None else after - (before or 0.0)


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
