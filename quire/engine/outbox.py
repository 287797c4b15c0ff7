"""What a turn of the loop brought, gathered into one Deltas for each API process.

Knows nothing about the state of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.engine.port import Port
from quire.messages import CLIENT_SHIFT, Deltas, End, Load, TokenLogprobs


@dataclass
class _Columns:
    ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    asked: bool = False


class Outbox:
    """Columns for each client; `flush` sends and forgets them."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._by_client: dict[int, _Columns] = {}

    def token(self, request_id: int, token: int, logprobs: TokenLogprobs | None) -> None:
        """A sequence gained a token."""
        columns = self._columns(request_id)
        columns.ids.append(request_id)
        columns.counts.append(1)
        columns.tokens.append(token)
        columns.logprobs.append(logprobs)
        columns.asked |= logprobs is not None

    def end(self, end: End) -> None:
        """A sequence's last message."""
        self._columns(end.id).ends.append(end)

    def flush(self, load: Callable[[], Load]) -> None:
        """One message to each client that is owed one."""
        for client, columns in self._by_client.items():
            logprobs = columns.logprobs if columns.asked else []
            self._port.send(client, Deltas(columns.ids, columns.counts, columns.tokens, logprobs, columns.ends, load()))
        self._by_client.clear()

    def _columns(self, request_id: int) -> _Columns:
        return self._by_client.setdefault(request_id >> CLIENT_SHIFT, _Columns())
