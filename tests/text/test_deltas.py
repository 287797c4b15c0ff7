"""A step's message, cut."""

from __future__ import annotations

import pytest

from quire.foundation.messages.from_engine import Deltas, End, Load
from quire.foundation.messages.workers import TokenLogprobs
from quire.text.deltas import SequenceDelta, deltas_by_sequence, in_pieces

ENTRY = TokenLogprobs(-1.0, 1, [5], [-1.0])
STEP = Deltas(
    ids=list(range(10)),
    counts=[1, 2, 1, 3, 1, 1, 1, 2, 1, 1],
    tokens=list(range(14)),
    logprobs=[ENTRY if i % 2 else None for i in range(14)],
    ends=[End(3, "stop"), End(9, "length"), *(End(i, "timeout") for i in range(20, 31))],
    load=Load(running=7),
    prompt_logprobs=[(2, [ENTRY]), (40, [ENTRY, ENTRY])],
    cached_tokens=[(0, 16), (8, 32)],
    last_add=99,
)


@pytest.mark.parametrize("most", [1, 3, 4, 10, 13, 100])
def test_pieces_say_together_what_the_whole_says_and_each_is_about_few(most: int) -> None:
    pieces = in_pieces(STEP, most)
    together: dict[int, SequenceDelta] = {}
    for piece in pieces:
        news = deltas_by_sequence(piece)
        assert len({*piece.ids, *(end.id for end in piece.ends)}) <= most
        assert (piece.load, piece.last_add) == (STEP.load, 99)
        assert len(piece.tokens) == len(piece.logprobs) == sum(piece.counts)
        for number, delta in news.items():
            if number in together:
                together[number].add(delta)
            else:
                together[number] = delta
    assert together == deltas_by_sequence(STEP)
    assert len(pieces) == (1 if most == 100 else -(-21 // most))


def test_an_end_comes_with_its_tokens() -> None:
    for piece in in_pieces(STEP, 4):
        if 3 in piece.ids:
            assert End(3, "stop") in piece.ends


def test_a_small_step_is_not_copied() -> None:
    assert in_pieces(STEP, 23) == [STEP]
    assert in_pieces(STEP, 23)[0] is STEP
