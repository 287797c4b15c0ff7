"""A step's tokens become one message for each client."""

from __future__ import annotations

import pytest

from quire.engine.outbox import Outbox
from quire.foundation.messages.from_engine import Deltas, End, FromEngine, Load
from quire.foundation.messages.to_engine import CLIENT_SHIFT
from quire.foundation.messages.workers import TokenLogprobs

OTHER = 1 << CLIENT_SHIFT


class Port:
    def __init__(self) -> None:
        self.sent: dict[int, list[FromEngine]] = {}

    def drain(self, wait: float | None) -> list[object]:
        return []

    def send(self, client: int, message: FromEngine) -> None:
        self.sent.setdefault(client, []).append(message)


def entry(token: int) -> TokenLogprobs:
    return TokenLogprobs(-float(token), 1, [], [])


@pytest.mark.parametrize("asked", [True, False])
def test_each_client_gets_its_own_tokens_in_one_message(asked: bool) -> None:
    port = Port()
    outbox = Outbox(port)  # type: ignore[arg-type]
    tokens = [1, 2, 3, 4, 5, 6]
    outbox.tokens([7, OTHER + 7, 8], [2, 3, 1], tokens, [entry(t) for t in tokens] if asked else [])
    outbox.tokens([OTHER + 9], [2], [10, 11], [])
    outbox.end(End(8, "stop"))
    outbox.flush(Load, {1: 9})
    outbox.flush(Load, {1: 9})
    (mine,), (theirs,) = port.sent[0], port.sent[1]
    assert isinstance(mine, Deltas)
    assert isinstance(theirs, Deltas)
    assert (mine.ids, mine.counts, mine.tokens) == ([7, 8], [2, 1], [1, 2, 6])
    assert (theirs.ids, theirs.counts, theirs.tokens) == ([OTHER + 7, OTHER + 9], [3, 2], [3, 4, 5, 10, 11])
    assert mine.logprobs == ([entry(1), entry(2), entry(6)] if asked else [])
    assert theirs.logprobs == ([entry(3), entry(4), entry(5), None, None] if asked else [])
    assert [end.id for end in mine.ends] == [8]
    assert not theirs.ends
