"""One sequence as its reader sees it, when a step brings more than one token."""

from __future__ import annotations

from pathlib import Path

from quire.api.prompt_report import PromptReport
from quire.api.shapes import LOWEST_LOGPROB, ChatShape, CompletionShape
from quire.messages import Add, End, TokenLogprobs
from quire.sampling import SamplingParams
from quire.text.choice import Choice, Delta
from quire.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoints import write_tokenizer


def tiny(directory: Path) -> Tokenizer:
    write_tokenizer(directory)
    return load_tokenizer(directory)


def entries(count: int) -> list[TokenLogprobs | None]:
    return [TokenLogprobs(float("-inf"), 2, [70], [-0.1]) for _ in range(count)]


def test_tokens_behind_a_stop_string_count_for_nothing(tmp_path: Path) -> None:
    tokenizer = tiny(tmp_path)
    choice = Choice(Add(1, [5], 1, SamplingParams(stop="cd", logprobs=1), [], 0, 0.0), tokenizer)
    letters = [tokenizer.encode(letter)[0] for letter in "abcdef"]
    piece = choice.take(Delta(letters, entries(6), End(1, "length")))
    assert (piece.text, piece.finish_reason, piece.stop_reason) == ("ab", "stop", "cd")
    assert piece.tokens == letters[:4]
    assert len(piece.logprobs) == choice.num_tokens == 4


def test_impossible_tokens_have_a_number_that_json_can_say(tmp_path: Path) -> None:
    tokenizer = tiny(tmp_path)
    choice = Choice(Add(1, [5], 1, SamplingParams(logprobs=1), [], 0, 0.0), tokenizer)
    piece = choice.take(Delta([70], entries(1), End(1, "length")))
    report = PromptReport([], tokenizer, False)
    chat = ChatShape(tokenizer, 1, "assistant", report).gain(0, piece)["logprobs"]["content"][0]
    assert chat["logprob"] == LOWEST_LOGPROB
    assert chat["top_logprobs"][0]["logprob"] == -0.1
    completion = CompletionShape(tokenizer, True, report).gain(0, piece)["logprobs"]
    assert completion["token_logprobs"] == [LOWEST_LOGPROB]


def test_without_a_tokenizer_tokens_are_named_by_number() -> None:
    choice = Choice(Add(1, [5], 1, SamplingParams(detokenize=False, logprobs=1), [], 0, 0.0), None)
    piece = choice.take(Delta([70], entries(1), End(1, "length")))
    assert (piece.text, piece.tokens) == ("", [70])
    shape = CompletionShape(None, True, PromptReport([], None, False))
    assert shape.gain(0, piece)["logprobs"]["tokens"] == ["token_id:70"]
