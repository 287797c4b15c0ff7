"""Who is turned away for want of room is told so before the request is read, at next to no cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire.foundation.messages.from_engine import Deltas, Load
from tests.api.scripted import READY, ScriptedClient
from tests.api.server import Server, resolved
from tests.api.test_lifetimes import eventually, in_background

LIMIT = 1_000
PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/messages", "/v1/responses",
    "/inference/v1/generate", "/invocations",
)  # fmt: skip
USER = {"role": "user", "content": "a"}
NOT_JSON = b'{"prompt": '


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, ScriptedClient]]:
    """A server whose key `flood` has 3 requests of some 257 tokens in a queue of at most 1,000."""
    client = ScriptedClient()
    settings = resolved(tmp_path_factory.mktemp("model"), max_queued_tokens=LIMIT, api_key=("flood", "light"))
    with Server(settings, lambda: client) as server:
        client.say(READY)
        server.wait_ready()
        body = {"prompt": "a", "max_tokens": 300}
        url = server.url + "/v1/completions"
        waiting = [in_background(lambda: httpx.post(url, json=body, headers=key("flood"), timeout=60)) for _ in "123"]
        adds = client.wait_for_adds(3)
        yield server, client
        client.say(Deltas([], [], [], ends=[client.end(add, "stop") for add in adds]))
        for thread, _ in waiting:
            thread.join(20)


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def queue(scripted: tuple[Server, ScriptedClient], tokens: int) -> Server:
    """The engine's queue has so many tokens beside the three requests that it has not seen yet."""
    server, client = scripted
    client.say(Deltas([], [], [], load=Load(running=16, waiting=9, queued_tokens=tokens, tokens_per_s=100.0)))
    unseen = sum(add.queued_tokens(256) for add in client.adds)
    assert 3 * 257 <= unseen <= 3 * 259
    eventually(lambda: server.session.admission_limit.tokens == tokens + unseen)
    return server


@pytest.mark.parametrize("path", PATHS)
def test_a_full_queue_is_said_without_reading_the_request(scripted: tuple[Server, ScriptedClient], path: str) -> None:
    server = queue(scripted, 200)
    rejected = server.session.stats.rejections["tokens"]
    answer = server.http.post(server.url + path, content=NOT_JSON, headers=key("flood"))
    assert answer.status_code == 429, answer.text
    assert answer.headers["retry-after"] == "10"
    assert server.session.stats.rejections["tokens"] == rejected + 1
    assert server.http.post(server.url + path, content=NOT_JSON, headers=key("light")).status_code == 429
    assert server.http.post(server.url + path, content=NOT_JSON).status_code == 401


def test_the_connection_goes_on_behind_a_body_that_was_not_read(scripted: tuple[Server, ScriptedClient]) -> None:
    server = queue(scripted, 200)
    with httpx.Client(base_url=server.url, headers=key("flood"), timeout=30) as client:
        for _ in range(3):
            large = client.post("/v1/completions", json={"prompt": "a" * 2**20})
            assert large.status_code == 429
            assert client.get("/v1/models").status_code == 200


def test_a_queue_with_room_reads_the_request(scripted: tuple[Server, ScriptedClient]) -> None:
    server = queue(scripted, 100)
    answer = server.http.post(server.url + "/v1/completions", content=NOT_JSON, headers=key("flood"))
    assert answer.status_code == 400
    too_much = server.http.post(
        server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 300}, headers=key("flood")
    )
    assert too_much.status_code == 429, "but there is none for so much"


def test_ollamas_clients_are_refused_before_their_prompt_is_rendered(scripted: tuple[Server, ScriptedClient]) -> None:
    server = queue(scripted, 200)
    url, body = server.url + "/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    assert server.http.post(url, json=body, headers=key("flood")).status_code == 429
    loads = server.http.post(url, json=body | {"messages": []}, headers=key("flood"))
    assert loads.status_code == 200, "to load the model costs nothing"


@pytest.mark.parametrize(("path", "fields", "param"), [
    ("/v1/completions", {"prompt": "a", "n": 2**31}, "n"),
    ("/v1/completions", {"prompt": "a", "n": 1_000}, "n"),
    ("/v1/completions", {"prompt": "a", "n": 10**40, "use_beam_search": True}, "n"),
    ("/v1/completions", {"prompt": ["a"] * 2_000}, "prompt"),
    ("/v1/completions", {"prompt": "a b " * 20_000}, None),
    ("/v1/completions", {"prompt": [5] * 100_000}, None),
    ("/v1/chat/completions", {"n": 2**31}, "n"),
    ("/v1/chat/completions", {"n": 1_000}, "n"),
    ("/v1/chat/completions", {"n": 10**40, "use_beam_search": True}, "n"),
    ("/inference/v1/generate", {"token_ids": [5] * 100_000, "sampling_params": {}}, None),
])  # fmt: skip
def test_what_could_never_run_is_told_so_whatever_the_queue_has_room_for(
    scripted: tuple[Server, ScriptedClient], path: str, fields: dict[str, Any], param: str | None
) -> None:
    server = queue(scripted, 100)
    body = {"max_tokens": 2} | fields if "sampling_params" not in fields else fields
    answer = server.http.post(
        server.url + path, json=({"messages": [USER]} if "chat" in path else {}) | body, headers=key("flood")
    )
    assert (answer.status_code, answer.json()["error"]["param"] if param else None) == (400, param), answer.text
