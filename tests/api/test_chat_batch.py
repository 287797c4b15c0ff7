"""POST /v1/chat/completions/batch: the answers that each conversation would have got alone."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from tests.api.server import Server

CONVERSATIONS = [
    [{"role": "user", "content": "a"}],
    [{"role": "system", "content": "b"}, {"role": "user", "content": "c"}],
    [{"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}, {"role": "user", "content": "f"}],
]


def test_each_conversation_gets_its_choice(server: Server) -> None:
    options = {"max_tokens": 5, "seed": 1, "logprobs": True}
    body = server.post("/v1/chat/completions/batch", {"messages": CONVERSATIONS, **options}).json()
    ChatCompletion.model_validate(body, strict=True)
    alone = [server.post("/v1/chat/completions", {"messages": each, **options}).json() for each in CONVERSATIONS]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    for choice, answer in zip(body["choices"], alone, strict=True):
        assert choice | {"index": 0} == answer["choices"][0]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert body["usage"][name] == sum(answer["usage"][name] for answer in alone)
    server.assert_all_free()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages[0]"),
        ({"messages": [[]]}, "messages"),
        ({"messages": CONVERSATIONS * 400}, "messages"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"tools": [{"type": "function", "function": {"name": "x"}}]}, "tools"),
        ({"temperature": -1}, "temperature"),
        ({"messages": [*CONVERSATIONS, [{"role": "user", "content": "x" * 3000}]]}, "prompt"),
    ],
)
def test_what_is_not_for_several_conversations_is_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/chat/completions/batch", {"messages": CONVERSATIONS, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    server.assert_all_free()
