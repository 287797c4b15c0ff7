"""Collects what a turn of the loop brought into one Deltas for each API process.

Knows nothing about the state of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from quire.engine.port import Port
from quire.foundation.messages.from_engine import Deltas, End, Load
from quire.foundation.messages.to_engine import CLIENT_SHIFT
from quire.foundation.messages.workers import TokenLogprobs


@dataclass
class _Columns:
    ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    asked: bool = False
    prompt_logprobs: list[tuple[int, list[TokenLogprobs]]] = field(default_factory=list)
    cached: list[tuple[int, int]] = field(default_factory=list)

    def add(self, ids: list[int], counts: list[int], tokens: list[int], logprobs: list[TokenLogprobs | None]) -> None:
        self.ids += ids
        self.counts += counts
        self.tokens += tokens
        self.logprobs += logprobs if logprobs else [None] * len(tokens)
        self.asked |= bool(logprobs)

    def deltas(self, load: Load, last_add: int) -> Deltas:
        logprobs = self.logprobs if self.asked else []
        return Deltas(
            self.ids, self.counts, self.tokens, logprobs, self.ends, load, self.prompt_logprobs, self.cached, last_add
        )


class Outbox:
    """Columns for each client; `flush` sends and clears them."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._by_client: dict[int, _Columns] = {}

    def tokens(
        self, ids: list[int], counts: list[int], tokens: list[int], logprobs: list[TokenLogprobs | None]
    ) -> None:
        """Sequence `ids[i]` gained the next `counts[i]` of `tokens`; `logprobs` is empty when none asked for any."""
        clients = {number >> CLIENT_SHIFT for number in ids}
        if len(clients) == 1:
            self._columns(ids[0]).add(ids, counts, tokens, logprobs)
            return
        start = 0
        for number, count in zip(ids, counts, strict=True):
            end = start + count
            self._columns(number).add([number], [count], tokens[start:end], logprobs[start:end])
            start = end

    def prompt_logprobs(self, news: list[tuple[int, list[TokenLogprobs]]]) -> None:
        """(sequence, log probabilities of its next prompt tokens)."""
        for entry in news:
            self._columns(entry[0]).prompt_logprobs.append(entry)

    def cached(self, news: list[tuple[int, int]]) -> None:
        """(sequence, prompt tokens found in the prefix cache)."""
        for entry in news:
            self._columns(entry[0]).cached.append(entry)

    def end(self, end: End) -> None:
        """A sequence's last message."""
        self._columns(end.id).ends.append(end)

    def drop(self, client: int) -> None:
        """Nobody reads what this client was to get."""
        self._by_client.pop(client, None)

    def flush(self, load: Callable[[], Load], last_adds: Mapping[int, int]) -> None:
        """Send one message to each client that has news.

        Args:
            load: What the engine has to do, told with the news.
            last_adds: By client, the last Add that is in it.
        """
        for client, columns in self._by_client.items():
            self._port.send(client, columns.deltas(load(), last_adds.get(client, 0)))
        self._by_client.clear()

    def _columns(self, request_id: int) -> _Columns:
        return self._by_client.setdefault(request_id >> CLIENT_SHIFT, _Columns())
