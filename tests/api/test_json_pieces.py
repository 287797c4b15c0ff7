"""Long answers are sent in pieces, and are refused where they would be too long."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from quire.errors import RequestError
from quire.sampling_params import SamplingParams
from quire.serving.api import json_pieces
from quire.serving.api.json_pieces import PIECE_BYTES, JsonPieces, PiecesResponse, check_answer_size, write_json
from tests.api.server import Server


def test_pieces_stand_where_they_stood_in_the_body() -> None:
    pieces = JsonPieces([b"[1", b",2", b"]"])
    body = {"a": pieces, "text": "as before", "list": [{"b": pieces}, {"c": JsonPieces([b"null"])}]}
    expected = {"a": [1, 2], "text": "as before", "list": [{"b": [1, 2]}, {"c": None}]}
    assert msgspec.json.decode(b"".join(write_json(body))) == expected
    assert write_json({"a": 1}) == [b'{"a":1}']


def test_every_write_is_small_and_they_are_as_long_as_announced() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    large = [b"x" * 10, b"y" * (3 * PIECE_BYTES + 5), *[b"z" * 100] * 20_000]
    asyncio.run(PiecesResponse(large)({}, None, send))  # type: ignore[arg-type]
    bodies = [message["body"] for message in sent[1:]]
    assert b"".join(bodies) == b"".join(large)
    assert max(map(len, bodies)) <= 2 * PIECE_BYTES
    assert dict(sent[0]["headers"])[b"content-length"] == str(sum(map(len, large))).encode()
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(bodies) - 1) + [False]


def size(**fields: Any) -> int:
    """The smallest limit under which a request passes."""
    lens, longest = fields.pop("lens", [100]), fields.pop("longest", 1_000)
    shown, stream, params = fields.pop("shown", 0), fields.pop("stream", False), SamplingParams(**fields)
    try:
        check_answer_size(lens, params, num_choices=params.n, longest=longest, prompts_shown=shown, held=not stream)
    except RequestError as error:
        return int(error.message.split(" might have ")[1].split()[0])
    return -1


@pytest.fixture
def refuse_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_pieces, "MAX_ENTRIES", -1)


@pytest.mark.usefixtures("refuse_all")
@pytest.mark.parametrize(
    ("fields", "entries"),
    [
        ({}, 0),
        ({"logprobs": 0, "max_tokens": 7}, 7),
        ({"logprobs": 4, "max_tokens": 7, "n": 3}, 3 * 7 * 5),
        ({"logprobs": 4, "max_tokens": 7, "n": 3, "stream": True}, 0),
        ({"logprobs": 0, "max_tokens": None}, 900),
        ({"logprob_token_ids": [5, 6], "max_tokens": 7}, 7 * 3),
        ({"prompt_logprobs": 2, "shown": 1, "n": 3}, 100 * 3),
        ({"prompt_logprobs": 2, "shown": 3, "n": 3}, 3 * 100 * 3),
        ({"shown": 3, "n": 3, "stream": True, "lens": [5, 6]}, 3 * 11),
        ({"shown": 1, "lens": [5_000], "truncate_prompt_tokens": 10}, 10),
        ({"shown": 1, "lens": [5_000], "truncate_prompt_tokens": -1}, 1_000),
    ],
)
def test_the_size_of_an_answer(fields: dict[str, Any], entries: int) -> None:
    assert size(**fields) == entries


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [5] * 100, "n": 20, "temperature": 1, "echo": True, "logprobs": 4}, "n"),
        ("/v1/completions", {"prompt": [5] * 100, "n": 20, "temperature": 1, "return_token_ids": True}, "n"),
        ("/v1/completions", {"prompt": [5] * 300, "prompt_logprobs": 4}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": [5], "logprobs": 4, "max_tokens": 300}, "logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 4, "max_tokens": 300}, "top_logprobs"),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"logprobs": 4}}, "sampling_params.logprobs"),
    ],
)
def test_too_large_an_answer_is_refused_on_every_endpoint(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    monkeypatch.setattr(json_pieces, "MAX_ENTRIES", 1_000)
    messages = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {}
    answer = server.post(path, messages | body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith("The answer might have ")
    if "max_tokens" in body:
        beams = {"use_beam_search": True, "stream": True, "temperature": 0}  # known only when all of it is
        assert server.post(path, messages | body | beams).json()["error"]["param"] == param
        assert server.post(path, messages | body | {"stream": True}).status_code == 200
