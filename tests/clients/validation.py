"""Whether responses are what the types of the official packages say, and keep the rules that types cannot say."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from tests.api.answer_recorder import Answer
from tests.api.answer_types import problems, route_of
from tests.clients.recorder import Exchange


def check(exchanges: Sequence[Exchange]) -> None:
    """Fail where a response is not what its path promises. Every exchange must be understood."""
    assert exchanges
    for exchange in exchanges:
        assert exchange.status == 200, (exchange.path, exchange.sent, bytes(exchange.received))
        answer = Answer(exchange.method, exchange.path, exchange.status, exchange.content_type, True, exchange.received)
        assert route_of(answer), f"nobody checks {exchange.path}"
        assert list(problems([answer])) == []
        if exchange.streamed:
            _check_stream(exchange)


def _check_stream(exchange: Exchange) -> None:
    match exchange.path:
        case "/v1/chat/completions" | "/v1/completions":
            _check_chunks(exchange)
        case "/v1/messages":
            _check_message_events(exchange)
        case "/v1/responses":
            pass  # an event has its type for a name, and all are typed
        case "/api/chat" | "/api/generate":
            lines = exchange.received.decode().splitlines()
            assert [json.loads(line)["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        case path:
            raise AssertionError(f"{path} streams, and nobody checks it")


def _check_chunks(exchange: Exchange) -> None:
    """Also: one role, one finish for each choice, the finish apart from content, usage only when asked for, and
    [DONE] once, at the end."""
    *events, done = [data for _, data in exchange.events]
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    roles: Counter[int] = Counter()
    finishes: Counter[int] = Counter()
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            said = choice.get("text") or delta.get("content") or delta.get("tool_calls") or delta.get("reasoning")
            roles[choice["index"]] += "role" in delta
            finishes[choice["index"]] += choice["finish_reason"] is not None
            assert not (said and choice["finish_reason"])
    indexes = range(exchange.sent.get("n") or 1)
    assert [finishes[i] for i in indexes] == [1] * len(indexes)
    if exchange.path.startswith("/v1/chat"):
        assert [roles[i] for i in indexes] == [1] * len(indexes)
    wanted = bool((exchange.sent.get("stream_options") or {}).get("include_usage"))
    assert [bool(chunk.get("usage")) for chunk in chunks] == [False] * (len(chunks) - wanted) + [True] * wanted


def _check_message_events(exchange: Exchange) -> None:
    names = [name for name, _ in exchange.events]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert names.count("content_block_start") == names.count("content_block_stop")
