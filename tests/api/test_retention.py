"""Prefixes that stay cached between the turns of a session, while others fill the cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from quire.errors import RequestError
from quire.serving.api.schemas.retention import seconds_of
from tests.api.server import Server, running

BLOCKS, SHARE = 32, 0.5
PROMPT = "Once upon a time there was a session that went on. " * 3
KEPT: list[dict[str, Any]] = [
    {"session_id": "mine"},
    {"prompt_cache_key": "mine"},
    {"prompt_cache_options": {"ttl": "10m"}},
    {"prompt_cache_retention": "24h"},
]
others = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("model"), num_blocks=BLOCKS, prompt_cache_share=SHARE) as server:
        yield server


def cached(server: Server, path: str = "/v1/completions", **fields: Any) -> int:
    """Tokens of the prompt that were found."""
    longest = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {longest: 1, **({"prompt": PROMPT} if path == "/v1/completions" else {}), **fields}
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    if path == "/v1/messages":
        return int(usage["cache_read_input_tokens"])
    return int((usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"])


def fill(server: Server) -> None:
    """Others' requests, of more tokens than the cache holds, one after the other."""
    for _ in range(2 * BLOCKS):
        cached(server, prompt=f"Request {next(others)} of somebody else, which is new and longer than a block.")


def forget(server: Server) -> None:
    assert server.post("/reset_prefix_cache", {}).status_code == 200


def retained_share(server: Server) -> float:
    name = "quire:prefix_cache_retained_perc"
    return next(
        float(line.rsplit(" ", 1)[1]) for line in server.get("/metrics").text.splitlines() if line.startswith(name)
    )


@pytest.mark.parametrize("fields", KEPT, ids=lambda fields: next(iter(fields)))
def test_a_session_finds_its_prefix_again(server: Server, fields: dict[str, Any]) -> None:
    forget(server)
    cached(server, **fields)
    assert 0 < retained_share(server) <= SHARE
    fill(server)
    assert cached(server) > len(PROMPT) // 16
    fill(server)
    assert cached(server) == 0, "without a wish, the last turn was not kept"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": PROMPT, "prompt_cache_key": "mine", "store": False}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "session_id": "mine"}),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [
                {"type": "text", "text": PROMPT, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            ]}]},
        ),
    ],
)  # fmt: skip
def test_every_api_has_its_wish(server: Server, path: str, fields: dict[str, Any]) -> None:
    forget(server)
    cached(server, path, **fields)
    fill(server)
    assert cached(server, path, **fields) > 0


def test_many_sessions_keep_no_more_than_the_share(server: Server) -> None:
    forget(server)
    for number in range(20):
        cached(server, prompt=f"Session {number}. {PROMPT}", session_id=str(number))
        assert retained_share(server) <= SHARE
    assert retained_share(server) > SHARE / 2
    fill(server)
    assert cached(server, prompt=f"Session 19. {PROMPT}") > 0
    assert cached(server, prompt=f"Session 0. {PROMPT}") == 0


@pytest.mark.parametrize("ttl", ["", "5", "5 m", "0m", "25h", "2d", "-5m", "5w", "1e3s"])
def test_times_that_cannot_be_kept_are_refused(ttl: str) -> None:
    with pytest.raises(RequestError, match="must be a time like 30m, from 1s to 24h"):
        seconds_of(ttl, "prompt_cache_options.ttl")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt_cache_options": {"ttl": "soon"}}, "prompt_cache_options.ttl"),
        ("/v1/completions", {"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ("/v1/completions", {"prompt_cache_retention": "for ever"}, "prompt_cache_retention"),
        ("/v1/completions", {"session_id": 7}, "session_id"),
    ],
)
def test_wrong_wishes_are_refused_by_name(server: Server, path: str, fields: dict[str, Any], param: str) -> None:
    answer = server.post(path, {"prompt": PROMPT, "max_tokens": 1, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
