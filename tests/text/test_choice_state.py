"""One sequence as its reader sees it, when a step brings more than one token."""

from __future__ import annotations

from pathlib import Path

from quire.foundation.messages.from_engine import End
from quire.foundation.messages.to_engine import Add
from quire.foundation.messages.workers import TokenLogprobs
from quire.sampling_params import SamplingParams
from quire.text.deltas import SequenceDelta
from quire.text.text_stream import ChoiceState
from quire.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoints import write_tokenizer


def tiny(directory: Path) -> Tokenizer:
    write_tokenizer(directory)
    return load_tokenizer(directory)


def entries(count: int) -> list[TokenLogprobs | None]:
    return [TokenLogprobs(float("-inf"), 2, [70], [-0.1]) for _ in range(count)]


def test_tokens_behind_a_stop_string_count_for_nothing(tmp_path: Path) -> None:
    tokenizer = tiny(tmp_path)
    choice = ChoiceState(Add(1, [5], 1, SamplingParams(stop="cd", logprobs=1), [], 0, 0.0), tokenizer)
    letters = [tokenizer.encode(letter)[0] for letter in "abcdef"]
    delta = choice.process(SequenceDelta(letters, entries(6), End(1, "length")))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("ab", "stop", "cd")
    assert delta.tokens == letters[:4]
    assert len(delta.logprobs) == choice.num_tokens == 4
