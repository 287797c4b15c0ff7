"""Masks behind drafts are those that come when the drafts have become tokens."""

from __future__ import annotations

import queue
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire.builtin
from quire.engine.structured_output.grammars import grammar_of
from quire.engine.structured_output.mask_maker import LOST, MaskMaker
from quire.engine.structured_output.matcher import Bitmasks
from quire.engine.structured_output.messages import Filled, Prepare, Prepared, Row, constraint_of, first_masks
from quire.structured_outputs_params import StructuredOutputsParams
from quire.text.tokenizer import load_tokenizer

QUILL = Path(quire.builtin.__file__).parent / "quill"
VOCAB = 4096
GRAMMARS: list[dict[str, Any]] = [
    {"json": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 4}},
    {"regex": "[a-c]{2,6}(-[0-9]+)?"},
    {"choice": ["left", "leftover", "right"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"regex": "(ab|cd){8,20}"},
]


class Maker:
    """A MaskMaker whose sequences begin when they are prepared."""

    def __init__(self, threads: int = 1, max_masks: int = 64) -> None:
        self._reports: queue.SimpleQueue[Prepared] = queue.SimpleQueue()
        self.masks = np.zeros((max_masks, VOCAB // 8), np.uint8)
        self._maker = MaskMaker(str(QUILL), str(QUILL), self.masks, VOCAB, threads, self._reports.put)

    def begin(self, prepare: Prepare) -> None:
        if not self._maker.prepare(prepare):
            assert self._reports.get() == Prepared(prepare.id)

    def fill(self, rows: list[Row]) -> Filled:
        return self._maker.fill(rows)


def prepare(number: int, min_tokens: int) -> Prepare:
    grammar = grammar_of(constraint_of(StructuredOutputsParams(**GRAMMARS[number])), {})
    return Prepare(number, grammar, False, [], min_tokens)


def allowed(mask: Bitmasks) -> list[int]:
    return np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("min_tokens", [0, 5])
def test_masks_behind_drafts_are_those_behind_tokens(threads: int, min_tokens: int) -> None:
    rng, maker, other = random.Random(threads + min_tokens), Maker(threads), Maker()
    prepared = [prepare(number, min_tokens) for number in range(len(GRAMMARS))]
    for each in prepared:
        maker.begin(each)

    def after(number: int, tokens: list[int]) -> tuple[bool, Bitmasks]:
        """Whether a sequence that is asked about for the first time goes on, and its mask."""
        other.begin(prepared[number])
        filled = other.fill([Row(number, tokens)])
        return filled.counts == [1], other.masks[0].copy()

    def guess(number: int, tokens: list[int]) -> list[int]:
        drafts: list[int] = []
        for _ in range(rng.randint(0, 4)):
            goes_on, mask = after(number, tokens + drafts)
            right = goes_on and rng.random() < 0.85
            drafts.append(rng.choice(allowed(mask)) if right else rng.randrange(VOCAB))
        return drafts

    outputs: dict[int, list[int]] = {number: [] for number in range(len(GRAMMARS))}
    new, behind = {number: [] for number in outputs}, 0
    for _ in range(60):
        rows = [Row(number, new[number], guess(number, tokens)) for number, tokens in outputs.items()]
        filled, masks = maker.fill(rows), maker.masks
        assert not filled.failures
        for row, first, count in zip(rows, first_masks(rows), filled.counts, strict=True):
            tokens = outputs[row.id]
            assert (count > 0) == after(row.id, tokens)[0]
            if not count:
                del outputs[row.id]
                continue
            for number in range(count):
                assert (masks[first + number] == after(row.id, tokens + row.drafts[:number])[1]).all()
            if count <= len(row.drafts):  # the next one is forbidden, or is the last token
                forbidden = row.drafts[count - 1] not in allowed(masks[first + count - 1])
                assert forbidden or after(row.id, tokens + row.drafts[:count])[0] is False
            behind += count - 1
            kept = rng.randrange(count)
            new[row.id] = [*row.drafts[:kept], rng.choice(allowed(masks[first + kept]))]
            tokens += new[row.id]
    assert set(outputs) <= {3} or min_tokens, "they end, but for long numbers"
    assert behind > 5


def test_a_grammar_that_explodes_while_it_runs_is_to_blame_itself() -> None:
    schema = {"type": "string", "minLength": 1, "maxLength": 5000, "pattern": "^$|(^(?:\\S+\\s+){0,99}\\S+$)"}
    grammar = grammar_of(constraint_of(StructuredOutputsParams(json=schema)), {})
    maker = Maker()
    maker.begin(Prepare(9, grammar, False, [], 0))
    maker.begin(prepare(1, 0))
    filled = maker.fill([Row(9, []), Row(1, [])])
    for token in load_tokenizer(QUILL).encode('"a text of some words', add_special_tokens=False):
        filled = maker.fill([Row(9, [token]), Row(1, [])])
        if filled.failures:
            break
    assert filled.counts == [0, 1]
    (failure,) = filled.failures.values()
    assert failure.refused
    assert "becomes too complex" in failure.message
    assert maker.fill([Row(7, [])]).failures == {0: LOST}, "a sequence that was lost"
    assert not LOST.refused
