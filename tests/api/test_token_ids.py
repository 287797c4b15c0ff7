"""`return_token_ids`: the tokens of prompt and answer beside the text, streamed or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.scripted import READY, ScriptedClient
from tests.api.server import Server, running
from tests.api.test_sse import events

MESSAGES: Any = [{"role": "user", "content": "hi"}]
ASKED = {"return_token_ids": True}


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def encode(server: Server, text: str) -> list[int]:
    return list(server.post("/tokenize", {"prompt": text}).json()["tokens"])


def test_completions_have_the_tokens_of_each_prompt_and_answer(server: Server, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["a", "xy"], max_tokens=3, n=2, extra_body=ASKED)
    for choice, prompt in zip(answer.choices, ["a", "a", "xy", "xy"], strict=True):
        shown: Any = choice
        assert shown.prompt_token_ids == encode(server, prompt)
        assert shown.token_ids == encode(server, choice.text)


def test_chat_has_the_prompts_tokens_once(server: Server, client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, n=2, extra_body=ASKED)
    assert answer.prompt_token_ids == server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert [choice.token_ids for choice in answer.choices] == [
        encode(server, choice.message.content) for choice in answer.choices
    ]


def test_the_stop_token_and_what_a_stop_string_cut_off_are_among_them(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 9, **ASKED}
    (stop_token,) = encode(server, "e")
    (choice,) = server.post("/v1/completions", body | {"stop_token_ids": [stop_token]}).json()["choices"]
    assert (choice["text"], choice["token_ids"]) == ("bcd", encode(server, "bcde"))
    (choice,) = server.post("/v1/completions", body | {"stop": "de"}).json()["choices"]
    assert (choice["text"], choice["token_ids"]) == ("bc", encode(server, "bcde"))


def test_a_streamed_completion_names_tokens_as_they_come(server: Server) -> None:
    chunks = events(server, "/v1/completions", prompt="a", max_tokens=5, stop="xyz", echo=True, **ASKED)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["prompt_token_ids"] == encode(server, "a")
    assert choices[0]["text"] == "a"
    assert not any("prompt_token_ids" in choice for choice in choices[1:])
    assert [token for choice in choices for token in choice["token_ids"]] == encode(server, "bcdef")


def test_a_token_whose_text_is_held_back_is_named_at_once(tmp_path: Path) -> None:
    """The text "c" might begin the stop string "cX": its token comes before it does."""
    client = ScriptedClient()
    client.say(READY)
    with running(tmp_path, client=lambda: client) as server:
        letters = [server.text.tokenizer.encode(letter)[0] for letter in "bcd"]  # type: ignore[union-attr]
        body = {"prompt": "a", "max_tokens": 9, "stop": "cX", "stream": True, **ASKED}
        seen = list[tuple[str, list[int]]]()
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=20) as answer:
            (add,) = client.wait_for_adds(1)
            client.tokens(add, letters[:1])
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                seen.append((choice["text"], choice["token_ids"]))
                if len(seen) == 4:
                    break
                if choice["token_ids"]:
                    client.tokens(add, [letters[len(seen) - 1]])
        assert seen == [("", []), ("b", letters[:1]), ("", letters[1:2]), ("cd", letters[2:])]


def test_a_streamed_chat_names_the_prompts_tokens_first(server: Server, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=4, stream=True, extra_body=ASKED
    )
    first, *rest = list[Any](stream)
    assert first.prompt_token_ids == server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in rest)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in rest)
    assert [token for chunk in rest for token in chunk.choices[0].token_ids] == encode(server, text)


def test_a_server_without_a_tokenizer_streams_tokens(tmp_path: Path) -> None:
    with running(tmp_path, skip_tokenizer_init=True) as server:
        chunks = events(server, "/v1/completions", prompt=[67, 68], max_tokens=3, **ASKED)
        assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == [69, 70, 71]
        assert chunks[0]["choices"][0]["prompt_token_ids"] == [67, 68]


def test_nobody_sees_tokens_that_were_not_asked_for(server: Server) -> None:
    for asked in (None, False):
        text = server.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "return_token_ids": asked}).text
        assert "token_ids" not in text
