"""What a step brings reaches its sequences, whichever way it takes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire.foundation.messages.from_engine import Deltas, End
from quire.foundation.messages.to_engine import Add
from quire.foundation.messages.workers import TokenLogprobs
from quire.sampling_params import SamplingParams
from quire.text.deltas import deltas_by_sequence
from quire.text.sequence_accumulator import SequenceAccumulator, dispatch_deltas
from quire.text.text_stream import ChoiceState
from quire.text.tokenizer import load_tokenizer
from tests.checkpoints import write_tokenizer

TOKENS_A_STEP = 3


@pytest.mark.parametrize("seed", range(5))
def test_dispatch_deltasy_is_what_taking_each_delta_is(seed: int, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer, draw = load_tokenizer(tmp_path), random.Random(seed)
    kinds = [
        SamplingParams(detokenize=False, stop_token_ids=list(range(20, 60))),
        SamplingParams(stop="ab"),
        SamplingParams(),
        SamplingParams(logprobs=0),
    ]

    def sequences() -> dict[int, SequenceAccumulator]:
        adds = [Add(number, [5], 1, kinds[number % 4], [], 0, 0.0) for number in range(8)]
        return {add.id: SequenceAccumulator(add, 0, ChoiceState(add, tokenizer)) for add in adds}

    dispatch_deltased, taken = sequences(), sequences()
    open_sequences = dict(dispatch_deltased)
    for step in range(20):
        ids = [number for number in open_sequences if draw.random() < 0.8]
        counts = [draw.randint(1, TOKENS_A_STEP) for _ in ids]
        tokens = [draw.randrange(20, 60) for _ in range(sum(counts))]
        entries = [TokenLogprobs(-0.5, 1, [], [])] * len(tokens) if draw.random() < 0.2 else []
        ends = [End(number, "stop") for number in open_sequences if draw.random() < 0.1]
        scored = [(number, [TokenLogprobs(-1.0, 1, [], [])]) for number in ids[:1] if step == 0]
        cached = [(number, 7) for number in ids[1:2] if step == 0]
        message = Deltas([*ids, 99], [*counts, 1], [*tokens, 7], [*entries, *entries[:1]], ends, prompt_logprobs=scored,
                         cached_tokens=cached)  # fmt: skip
        over = [s.add.id for s in dispatch_deltas(message, open_sequences)]
        news = deltas_by_sequence(message)
        assert sorted(over) == sorted(i for i in open_sequences if i in news and taken[i].add_delta(news[i]))
        for number in over:
            del open_sequences[number]
        for number, sequence in dispatch_deltased.items():
            other = taken[number]
            assert (sequence.whole, sequence.end) == (other.whole, other.end)
            seen, same = sequence.choice, other.choice
            assert (seen.num_tokens, seen.cached_tokens, seen.finished) == (
                same.num_tokens,
                same.cached_tokens,
                same.finished,
            )
    assert any(sequence.whole.tokens for sequence in dispatch_deltased.values())
