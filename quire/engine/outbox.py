"""Collects what a turn of the loop brought into one Deltas for each API process.

Knows nothing about the state of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from quire.engine.port import Port
from quire.foundation.messages.from_engine import Deltas, End, Load
from quire.foundation.messages.to_engine import CLIENT_SHIFT
from quire.foundation.messages.workers import TokenLogprobs


class Outbox:
    """News for each client; `flush` sends them."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._by_client: dict[int, Deltas] = {}  # their lists grow until they are sent

    def tokens(
        self, ids: list[int], counts: list[int], tokens: list[int], logprobs: list[TokenLogprobs | None]
    ) -> None:
        """Sequence `ids[i]` gained the next `counts[i]` of `tokens`; `logprobs` is empty when none asked for any."""
        clients = {number >> CLIENT_SHIFT for number in ids}
        if len(clients) == 1:
            _add(self._news(ids[0]), ids, counts, tokens, logprobs)
            return
        start = 0
        for number, count in zip(ids, counts, strict=True):
            end = start + count
            _add(self._news(number), [number], [count], tokens[start:end], logprobs[start:end])
            start = end

    def prompt_logprobs(self, news: list[tuple[int, list[TokenLogprobs]]]) -> None:
        """Add (sequence, log probabilities of its next prompt tokens)."""
        for entry in news:
            self._news(entry[0]).prompt_logprobs.append(entry)

    def cached(self, news: list[tuple[int, int]]) -> None:
        """Add (sequence, prompt tokens found in the prefix cache)."""
        for entry in news:
            self._news(entry[0]).cached_tokens.append(entry)

    def end(self, end: End) -> None:
        """Add a sequence's last message."""
        self._news(end.id).ends.append(end)

    def drop(self, client: int) -> None:
        """Drop what a client that is gone was to get."""
        self._by_client.pop(client, None)

    def flush(self, load: Callable[[], Load], last_adds: Mapping[int, int]) -> None:
        """Send one message to each client that has news.

        Args:
            last_adds: The last Add of each client that is in `load`.
        """
        for client, news in self._by_client.items():
            _add(news, [], [], [], [])
            self._port.send(client, replace(news, load=load(), last_add=last_adds.get(client, 0)))
        self._by_client.clear()

    def _news(self, request_id: int) -> Deltas:
        return self._by_client.setdefault(request_id >> CLIENT_SHIFT, Deltas([], [], []))


def _add(
    news: Deltas, ids: list[int], counts: list[int], tokens: list[int], logprobs: list[TokenLogprobs | None]
) -> None:
    """Append tokens to a client's news, which have log probabilities for all tokens as soon as they have any."""
    if logprobs or news.logprobs:
        news.logprobs.extend([None] * (len(news.tokens) - len(news.logprobs)))
    news.ids.extend(ids)
    news.counts.extend(counts)
    news.tokens.extend(tokens)
    news.logprobs.extend(logprobs)
