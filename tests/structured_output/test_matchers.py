"""Masks behind drafts are those that come when the drafts have become tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire.builtin
from quire.engine.structured_output.compiled_grammars import compile_grammar, load_grammar_tokenizer
from quire.engine.structured_output.constraint import constraint_of
from quire.engine.structured_output.grammars import grammar_of
from quire.engine.structured_output.limits import parser_limits
from quire.engine.structured_output.matcher_messages import Prepare, Row, RowState, first_masks
from quire.engine.structured_output.matchers import Bitmasks, Matchers
from quire.structured_outputs_params import StructuredOutputsParams

QUILL = Path(quire.builtin.__file__).parent / "quill"
VOCAB = 4096
TOKENIZER, EOS = load_grammar_tokenizer(QUILL, QUILL, VOCAB)
GRAMMARS: list[dict[str, Any]] = [
    {"json": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 4}},
    {"regex": "[a-c]{2,6}(-[0-9]+)?"},
    {"choice": ["left", "leftover", "right"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"regex": "(ab|cd){8,20}"},
]


def prepare(number: int, min_tokens: int) -> tuple[Prepare, Any]:
    grammar = grammar_of(constraint_of(StructuredOutputsParams(**GRAMMARS[number])), {})
    return Prepare(number, grammar, False, [], min_tokens), compile_grammar(TOKENIZER, grammar, parser_limits())


def allowed(mask: Bitmasks) -> list[int]:
    return np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("min_tokens", [0, 5])
def test_masks_behind_drafts_are_those_behind_tokens(threads: int, min_tokens: int) -> None:
    rng, matchers = random.Random(threads + min_tokens), Matchers(TOKENIZER, EOS, threads)
    prepared = [prepare(number, min_tokens) for number in range(len(GRAMMARS))]
    for each in prepared:
        matchers.add(*each)

    def after(number: int, tokens: list[int]) -> tuple[RowState, Bitmasks]:
        """Of a sequence that is asked about for the first time."""
        fresh, mask = Matchers(TOKENIZER, EOS, 1), np.zeros((1, VOCAB // 8), np.uint8)
        fresh.add(*prepared[number])
        return fresh.fill([Row(number, tokens)], mask).states[0], mask[0]

    def guess(number: int, tokens: list[int]) -> list[int]:
        drafts: list[int] = []
        for _ in range(rng.randint(0, 4)):
            state, mask = after(number, tokens + drafts)
            right = state == "masked" and rng.random() < 0.85
            drafts.append(rng.choice(allowed(mask)) if right else rng.randrange(VOCAB))
        return drafts

    outputs: dict[int, list[int]] = {number: [] for number in range(len(GRAMMARS))}
    new, behind = {number: [] for number in outputs}, 0
    for _ in range(60):
        rows = [Row(number, new[number], guess(number, tokens)) for number, tokens in outputs.items()]
        masks = np.zeros((sum(1 + len(row.drafts) for row in rows), VOCAB // 8), np.uint8)
        filled = matchers.fill(rows, masks)
        counts = filled.counts or [1] * len(rows)
        for row, state, first, count in zip(rows, filled.states, first_masks(rows), counts, strict=True):
            tokens = outputs[row.id]
            assert state == after(row.id, tokens)[0]
            if state != "masked":
                assert count == 1
                del outputs[row.id]
                continue
            for number in range(count):
                assert (masks[first + number] == after(row.id, tokens + row.drafts[:number])[1]).all()
            if count <= len(row.drafts):  # the next one is forbidden, or is the last token
                forbidden = row.drafts[count - 1] not in allowed(masks[first + count - 1])
                assert forbidden or after(row.id, tokens + row.drafts[:count])[0] != "masked"
            behind += count - 1
            kept = rng.randrange(count)
            new[row.id] = [*row.drafts[:kept], rng.choice(allowed(masks[first + kept]))]
            tokens += new[row.id]
    assert set(outputs) <= {3} or min_tokens, "they end, but for long numbers"
    assert behind > 5


def test_a_grammar_that_explodes_while_it_runs_is_to_blame_itself() -> None:
    schema = {"type": "string", "minLength": 1, "maxLength": 5000, "pattern": "^$|(^(?:\\S+\\s+){0,99}\\S+$)"}
    grammar = grammar_of(constraint_of(StructuredOutputsParams(json=schema)), {})
    matchers, masks = Matchers(TOKENIZER, EOS, 1), np.zeros((2, VOCAB // 8), np.uint8)
    matchers.add(Prepare(9, grammar, False, [], 0), compile_grammar(TOKENIZER, grammar, parser_limits()))
    matchers.add(*prepare(1, 0))
    filled = matchers.fill([Row(9, []), Row(1, [])], masks)
    for token in TOKENIZER.tokenize_str('"a text of some words'):
        filled = matchers.fill([Row(9, [token]), Row(1, [])], masks)
        if filled.states[0] == "failed":
            break
    assert filled.states == ["failed", "masked"]
    assert filled.refused == [0]
    assert "becomes too complex" in filled.errors[0]
    assert matchers.fill([Row(7, [])], masks).refused == [], "a sequence that was lost"
