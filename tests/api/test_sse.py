"""What streams and whole answers say, chunk by chunk."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.server import Server
from tests.checkpoints import IM_END_ID

CHUNK_KEYS = {"id", "created", "model", "object", "choices"}


def events(server: Server, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The JSON of a stream's events; its end is checked."""
    answer = server.post(path, {**fields, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert answer.text.count("[DONE]") == 1
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def chat(server: Server, **fields: Any) -> list[dict[str, Any]]:
    return events(server, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], **fields)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "usage", [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
def test_every_chat_chunk(server: Server, n: int, usage: dict[str, bool] | None) -> None:
    chunks = chat(server, n=n, max_tokens=30, stream_options=usage)
    last = chunks.pop() if usage else None
    states = ["new"] * n
    for chunk in chunks:
        assert set(chunk) == CHUNK_KEYS | ({"usage"} if usage else set())
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["id"] == chunks[0]["id"].strip()
        (choice,) = chunk["choices"]
        delta, state = choice["delta"], states[choice["index"]]
        if state == "new":
            assert delta == {"role": "assistant", "content": ""}
            states[choice["index"]] = "open"
        elif choice["finish_reason"] is None:
            assert state == "open"
            assert set(delta) == {"content"}
            assert delta["content"]
        else:
            assert state == "open"
            assert (delta, choice["finish_reason"], choice["stop_reason"]) == ({}, "length", None)
            states[choice["index"]] = "ended"
        counts = chunk.get("usage")
        assert bool(counts) == bool(usage and usage.get("continuous_usage_stats"))
    assert states == ["ended"] * n
    if last is not None:
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 30 * n


def test_every_completion_chunk(server: Server) -> None:
    chunks = events(server, "/v1/completions", prompt=["a", "A"], n=2, max_tokens=3, logprobs=1)
    texts = [""] * 4
    for chunk in chunks:
        assert set(chunk) == CHUNK_KEYS
        assert chunk["object"] == "text_completion"
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["logprobs"]:
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert texts == ["bcd", "bcd", "BCD", "BCD"]
    assert sum(chunk["choices"][0]["finish_reason"] is not None for chunk in chunks) == 4


def completion(server: Server, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/completions", fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_log_probabilities_of_completions(server: Server) -> None:
    (choice,) = completion(server, prompt="a", max_tokens=3, logprobs=2)["choices"]
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [-0.5] * 3,
        "tokens": ["b", "c", "d"],
        "top_logprobs": [{"b": -0.5, "c": -1.5}, {"c": -0.5, "d": -1.5}, {"d": -0.5, "e": -1.5}],
    }


def test_a_stop_string_ends_the_text_and_the_work(server: Server) -> None:
    whole = completion(server, prompt="a", stop=["fgh", "gz"], max_tokens=300)
    assert whole["choices"][0] | {"logprobs": None} == {
        "index": 0, "text": "bcde", "logprobs": None, "finish_reason": "stop", "stop_reason": "fgh",
    }  # fmt: skip
    assert whole["usage"]["completion_tokens"] == 7
    kept = completion(server, prompt="a", stop="fgh", max_tokens=300, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == "bcdefgh"
    streamed = events(server, "/v1/completions", prompt="a", stop="fgh", max_tokens=300)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "bcde"
    server.assert_all_free()


def test_a_stop_token_is_named_and_not_shown(server: Server) -> None:
    token = server.post("/tokenize", {"prompt": "e"}).json()["tokens"][0]
    (choice,) = completion(server, prompt="a", stop_token_ids=[token], max_tokens=9)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("bcd", "stop", token)
    (choice,) = completion(server, prompt="a", stop_token_ids=[token], min_tokens=6, max_tokens=9)["choices"]
    assert choice["finish_reason"] == "length"


def test_prompts_of_all_four_kinds(server: Server) -> None:
    tokens = server.post("/tokenize", {"prompt": "a"}).json()["tokens"]
    for prompt in ("a", ["a"], tokens, [tokens]):
        assert completion(server, prompt=prompt, max_tokens=2)["choices"][0]["text"] == "bc"


def test_neutral_fields_change_nothing(server: Server) -> None:
    plain = completion(server, prompt="a", max_tokens=3)["choices"]
    neutral = completion(
        server, prompt="a", max_tokens=3, user="me", metadata={"a": "b"}, store=False, service_tier="auto", tools=[],
        tool_choice="none", presence_penalty=0, frequency_penalty=0.0, repetition_penalty=1.0, logit_bias=None,
        echo=False, response_format={"type": "text"}, best_of=1, n=1, suffix=None, use_beam_search=False,
        parallel_tool_calls=True, safety_identifier="x", prompt_cache_key="y", temperature=None, stream=False,
    )  # fmt: skip
    assert neutral["choices"] == plain


def test_tokens_there_and_back(server: Server) -> None:
    chat_tokens = server.post("/tokenize", {"messages": [{"role": "user", "content": "é"}]}).json()
    assert chat_tokens["count"] == len(chat_tokens["tokens"])
    assert chat_tokens["max_model_len"] == 512
    text = server.post("/detokenize", {"tokens": chat_tokens["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n"
    strings = server.post("/tokenize", {"prompt": "a b", "return_token_strs": True}).json()["token_strs"]
    assert "".join(strings) == "aĠb"


def test_going_on_with_the_last_message(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ab"}]}
    body |= {"continue_final_message": True}  # type: ignore[dict-item]
    answer = server.post("/v1/chat/completions", body | {"max_tokens": 3, "add_generation_prompt": False}).json()
    assert answer["choices"][0]["message"]["content"] == "cde"


def test_content_parts_are_joined(server: Server) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    as_parts = server.post("/tokenize", {"messages": [{"role": "developer", "content": parts}]}).json()
    as_text = server.post("/tokenize", {"messages": [{"role": "system", "content": "a\nb"}]}).json()
    assert as_parts == as_text


def test_the_end_token_shows_nothing(server: Server) -> None:
    ends = server.post("/detokenize", {"tokens": [IM_END_ID]}).json()["prompt"]
    assert ends == "<|im_end|>"
    (choice,) = completion(server, prompt=[IM_END_ID], max_tokens=2)["choices"]
    assert ends not in choice["text"]
