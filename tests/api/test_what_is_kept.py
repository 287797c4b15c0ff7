"""Nothing that clients send makes anything in the process grow for good: every container is looked at."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from quire.engine.metrics.stats import SequenceStats
from quire.serving.api.chat_service import ChatPrompt
from quire.serving.api.schemas.chat import ChatRequest
from quire.serving.api.session.output_collector import OutputCollector
from tests.api.server import ANSWERS, Server, running
from tests.api.test_lifetimes import eventually

KINDS = {dict, list, set, deque, OrderedDict, defaultdict, Counter}
"""Types of containers."""
ROUND = 12
"""Requests of each kind in a round. What grows by half as many is kept for each."""
USER = [{"role": "user", "content": "a"}]


def requests(number: int) -> list[tuple[str, str, Any]]:
    """One of each kind; all that a client can choose is another for each number."""
    name, body = f"name-{number}", {"max_tokens": 2}
    return [
        ("POST", "/v1/completions", body | {"prompt": name, "user": name, "cache_salt": name, "stop": [name]}),
        ("POST", "/v1/completions", body | {"prompt": "a", "request_id": name, "seed": number}),
        ("POST", "/v1/completions", body | {"prompt": "a", "model": name}),
        ("POST", "/v1/completions", body | {"prompt": "a", name: name}),
        ("POST", "/v1/completions", body | {"prompt": [number], "stream": True}),
        ("POST", "/v1/chat/completions", body | {"messages": USER, "metadata": {name: name}}),
        ("POST", "/v1/chat/completions", body | {"messages": USER, "chat_template_kwargs": {name: name}}),
        ("POST", "/v1/chat/completions", body | {"messages": USER, "chat_template": "a" * number}),
        ("POST", "/v1/responses", {"input": name, "store": False, "max_output_tokens": 2}),
        ("POST", "/tokenize", {"prompt": name}),
        ("GET", f"/{name}", None),
        ("GET", f"/v1/models/{name}", None),
        ("GET", f"/v1/responses/resp_{name}", None),
        (name.upper(), "/v1/completions", None),
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options: dict[str, Any] = {
        "tenant_header": "X-Tenant",
        "trust_request_chat_template": True,
        "num_blocks": 8,
        "max_model_len": 64,
    }  # filled soon
    with running(tmp_path_factory.mktemp("model"), **options) as server:
        yield server


async def send(server: Server, numbers: range) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        for number in numbers:
            headers = {"X-Tenant": f"tenant-{number}", "X-Request-Id": f"id-{number}", f"X-{number}": "a"}
            for method, path, body in requests(number):
                await client.request(method, path, json=body, headers=headers)


def containers() -> dict[int, Any]:
    """Every dict, list, set and deque, by its id. One that holds nothing but texts and numbers is found only through
    what refers to it."""
    gc.collect()
    return {
        id(each): each
        for owner in gc.get_objects()
        if not _is_bounded_cache(owner)
        for each in (owner, *gc.get_referents(owner))
        if type(each) in KINDS
    }


def sizes() -> dict[int, int]:
    return {number: len(each) for number, each in containers().items()}


@pytest.mark.long("api")
def test_no_container_grows_with_what_clients_send(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.unfreeze()  # also what modules hold
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", False)  # pytest keeps all records that reach the root
    rounds = []
    for number in range(3):  # what is bounded is filled in the first one
        asyncio.run(send(server, range(1 + number * ROUND, 1 + (number + 1) * ROUND)))
        server.assert_all_free()
        ANSWERS.clear()  # which the tests keep
        rounds.append(sizes())
    first, second, third = rounds
    least = ROUND / 2
    grown = {
        number
        for number, size in third.items()
        if size - second.get(number, size) >= least and second[number] - first.get(number, second[number]) >= least
    }
    found = [each for number, each in containers().items() if number in grown and not _is_pruned(each)]
    assert [shown(each) for each in found] == []
    assert len(third) - len(second) < ROUND, "so many are new"


def _is_bounded_cache(owner: object) -> bool:
    return type(owner) is functools._lru_cache_wrapper and owner.cache_parameters()["maxsize"] is not None


def _is_pruned(container: Any) -> bool:
    """asyncio's timers and a SQLite connection's cursors: those that are over are forgotten a hundred at a time. The
    overload detector keeps the samples of half a minute, ten a second."""
    newest = container[-1] if type(container) in (list, deque) else None
    return isinstance(newest, asyncio.TimerHandle | weakref.ref) or type(newest).__name__ == "_Sample"


def shown(container: Any) -> str:
    return f"{type(container).__name__} of {len(container)}: {list(container)[-3:]!r:.300}"


@contextmanager
def no_garbage(*types: type) -> Iterator[None]:
    """None of these that is made within it needs a search for cycles to go."""

    def living() -> int:
        return sum(type(each) in types for each in gc.get_objects())

    gc.collect()
    before = living()
    gc.disable()
    try:
        yield
        eventually(lambda: living() <= before)
    finally:
        gc.enable()


def test_the_sequences_of_a_request_are_no_garbage_that_must_be_searched_for(server: Server) -> None:
    """A scope and its request are a cycle, so what they refer to would wait for a search, and that holds the loop."""
    with no_garbage(OutputCollector, SequenceStats):
        for stream in (False, True):
            body = {"prompt": "a", "n": 4, "max_tokens": 2, "stream": stream}
            assert server.http.post(f"{server.url}/v1/completions", json=body).status_code == 200
            server.assert_all_free()


def test_what_is_refused_is_no_garbage_that_must_be_searched_for(server: Server) -> None:
    """Its error refers to the calls that it came through, and these to all that was sent."""
    several: list[tuple[dict[str, Any], int]] = [
        ({"model": "another"}, 404),
        ({"messages": [{"role": "user", "content": "a" * 1000}]}, 400),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, 400),
        ({"logit_bias": {"60000": 1}}, 400),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "a"}}}}, 400),
        ({"stream": True, "guided_regex": "("}, 400),
    ]
    with no_garbage(ChatRequest, ChatPrompt):
        for wrong, status in several:
            body = {"messages": USER, "max_tokens": 2} | wrong
            answer = server.http.post(f"{server.url}/v1/chat/completions", json=body)
            assert answer.status_code == status, answer.text
