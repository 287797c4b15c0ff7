"""How tokens and their log probabilities look in JSON."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from quire.foundation.messages.workers import TokenLogprobs
from quire.serving.api.answers import CompletionSerializer
from quire.serving.api.chat_serializer import ChatSerializer
from quire.serving.api.token_fields import LOWEST_LOGPROB, PromptFields, TokenNames
from quire.text.deltas import ChoiceDelta
from quire.text.output_parsers.events import ToolCallDelta, ToolCallStart
from quire.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoints import write_tokenizer


def completion_serializer(tokenizer: Tokenizer | None, *, as_ids: bool = False) -> CompletionSerializer:
    return CompletionSerializer(TokenNames(tokenizer, as_ids), True, PromptFields([], 1, tokenizer))


def test_parts_of_a_character_are_told_apart(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokens = tokenizer.encode("é🦄é")
    delta = ChoiceDelta("é🦄é", tokens, [TokenLogprobs(-0.5, 1, [], []) for _ in tokens], "length")
    shown = completion_serializer(tokenizer).chunks(0, delta)[0]["logprobs"]
    partial = [token for token in shown["tokens"] if token.startswith("bytes:")]
    assert partial[0] == "bytes:\\xf0"
    assert len(set(partial)) == len(partial) == 4
    assert shown["text_offset"][-1] == 2


def test_impossible_tokens_have_a_number_that_json_can_hold(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    delta = ChoiceDelta("a", [70], [TokenLogprobs(float("-inf"), 2, [70], [-0.1])], finish_reason="length")
    prompt = PromptFields([], 1, tokenizer)
    chat = ChatSerializer(TokenNames(tokenizer), 1, "assistant", prompt).chunks(0, delta)[0]["logprobs"]["content"][0]
    assert chat["logprob"] == LOWEST_LOGPROB
    assert chat["top_logprobs"][0]["logprob"] == -0.1
    completion = completion_serializer(tokenizer).chunks(0, delta)[0]["logprobs"]
    assert completion["token_logprobs"] == [LOWEST_LOGPROB]


def test_without_a_tokenizer_tokens_are_named_by_id() -> None:
    delta = ChoiceDelta("", [70], [TokenLogprobs(-1.0, 2, [], [])], finish_reason="length")
    assert completion_serializer(None).chunks(0, delta)[0]["logprobs"]["tokens"] == ["token_id:70"]


@pytest.mark.parametrize(("named", "reason"), [(True, "stop"), (False, "tool_calls")])
def test_a_call_that_was_named_ends_as_openais_does(named: bool, reason: str) -> None:
    delta = ChoiceDelta(
        "", [], finish_reason="tool_calls", events=[ToolCallStart(0, "f", "call_1"), ToolCallDelta(0, "{}")]
    )
    serializer = ChatSerializer(
        TokenNames(None), None, "assistant", PromptFields([[5]], 1, None), may_call=True, named_call=named
    )
    body = {**asyncio.run(serializer.body([delta])), **serializer.head("1", 1, "m", stream=False)}
    completion = ChatCompletion.model_validate(body, strict=True)
    assert completion.choices[0].finish_reason == reason
    chunk = {**serializer.head("1", 1, "m", stream=True), "choices": [serializer.last_chunk(0, delta)]}
    assert ChatCompletionChunk.model_validate(chunk, strict=True).choices[0].finish_reason == reason
