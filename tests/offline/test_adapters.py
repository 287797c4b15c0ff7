"""Which adapters an engine of this process is asked to load, and what becomes of its answers."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import pytest

from quire import LoRARequest
from quire.engine.inprocess import InProcessClient
from quire.errors import RequestError
from quire.foundation.messages.from_engine import Deltas, Done, FromEngine
from quire.foundation.messages.to_engine import Adapter, Control
from quire.offline.adapters import LocalAdapters

STALE = Done(0, {"name": "stale", "path": "elsewhere", "digest": "0"})
DELTAS = cast(Deltas, object())


class Client:
    """Answers once it is waited for, the last command first, behind an answer that nobody waits for any more."""

    def __init__(self, errors: dict[str, str]) -> None:
        self._errors = errors
        self.asked: list[list[str]] = [[]]
        self._answers: deque[FromEngine] = deque([STALE, DELTAS])

    def send(self, control: Control) -> None:
        name, path = control.value["name"], control.value["path"]
        self.asked[-1].append(name)
        error = self._errors.get(name, "")
        value: dict[str, Any] = {} if error else {"name": name, "path": path, "digest": f"of {name}"}
        self._answers.insert(2, Done(control.id, value, error))

    def receive(self, timeout: float | None) -> FromEngine:
        assert timeout is None
        if self.asked[-1]:
            self.asked.append([])
        return self._answers.popleft()


def adapters_of(**errors: str) -> tuple[LocalAdapters, Client]:
    client = Client(errors)
    return LocalAdapters(cast(InProcessClient, client)), client


def request(name: str) -> LoRARequest:
    return LoRARequest(name, 1, f"./{name}")


def test_all_that_are_new_are_asked_for_before_any_is_waited_for() -> None:
    adapters, client = adapters_of()
    a, b, c = map(request, "abc")
    others: list[FromEngine | None] = []
    loaded = adapters.load_all([a, None, b, a], others.append)
    expected = [Adapter(name, f"./{name}", f"of {name}") for name in "ab"]
    assert loaded == [expected[0], None, expected[1], expected[0]]
    assert client.asked == [["a", "b"], []]
    assert others == [DELTAS]
    client._answers.extendleft([DELTAS, STALE])
    assert adapters.load_all([c]) == [Adapter("c", "./c", "of c")]
    assert adapters.load_all([c, b]) == [Adapter("c", "./c", "of c"), expected[1]]
    assert client.asked == [["a", "b"], ["c"], []]


def test_the_first_that_is_refused_is_named_and_others_are_loaded() -> None:
    adapters, client = adapters_of(b="no such tensor", c="too large")
    a, b, c, d = map(request, "abcd")
    with pytest.raises(RequestError, match="no such tensor"):
        adapters.load_all([a, b, c, d])
    assert adapters.load_all([d, a]) == [Adapter("d", "./d", "of d"), Adapter("a", "./a", "of a")]
    assert client.asked == [["a", "b", "c", "d"], []]
