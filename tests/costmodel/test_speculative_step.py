"""Steps with drafts: the parts add up, and what pays is what the terms say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.forced_speculation import GPU_HOST, HostTimes, SpeculativeStepTime, tokens_of_a_row
from quire.models.spec import read_spec
from quire.planning.costmodel.cards import CARDS, GPU_SHARES
from quire.planning.costmodel.step_time import StepTime

MODELS = Path(__file__).parents[2] / "quire" / "tools" / "sizing" / "measured"
LLAMA, SMALL = read_spec(MODELS / "llama-3.1-8b"), read_spec(MODELS / "qwen3-0.6b")
HARDWARE = CARDS["h100"].hardware
TARGET, DRAFT = (StepTime(spec, "bfloat16", HARDWARE, "bfloat16", GPU_SHARES) for spec in (LLAMA, SMALL))
STEP = SpeculativeStepTime(TARGET, DRAFT, GPU_HOST)


def test_without_drafts_it_is_a_step_of_the_model() -> None:
    assert STEP(8, 200, 0) == TARGET.decode(8, 200)
    assert TARGET.verification(8, 200, 0) == pytest.approx(TARGET.decode(8, 200))


def test_drafting_and_verification_add_up() -> None:
    passes = 3 * DRAFT.decode(8, 200)
    assert STEP(8, 200, 3) == pytest.approx(GPU_HOST.ask_ms + passes + TARGET.verification(8, 200, 3))
    assert SpeculativeStepTime(TARGET, None, GPU_HOST)(8, 200, 3) == pytest.approx(STEP(8, 200, 3) - passes)
    slow_host = SpeculativeStepTime(TARGET, DRAFT, HostTimes(0.0, 5.0))
    assert slow_host.drafting_ms(1, 200, 2) == 10


def test_a_row_reads_its_context_once_for_all_its_drafts() -> None:
    """A long context costs a step with drafts as much as one without, until scores take longer than reading."""
    for drafts in (1, 4):
        longer = TARGET.verification(4, 60_000, drafts) - TARGET.verification(4, 10_000, drafts)
        assert longer == pytest.approx(TARGET.decode(4, 60_000) - TARGET.decode(4, 10_000))
    scores = replace(GPU_SHARES, scores=1e-4)
    slow = StepTime(LLAMA, "bfloat16", HARDWARE, "bfloat16", scores)
    assert slow.verification(4, 60_000, 4) > 4 * slow.verification(4, 60_000, 0)
    layers = tuple(replace(layer, mixer=replace(layer.mixer, window=128)) for layer in LLAMA.layers)
    windowed = StepTime(replace(LLAMA, layers=layers), "bfloat16", HARDWARE, "bfloat16", GPU_SHARES)
    assert windowed.verification(4, 1_000, 2) == pytest.approx(windowed.verification(4, 9_000, 2))


def test_rows_bring_the_tokens_of_the_paper() -> None:
    assert [tokens_of_a_row(4, rate) for rate in (0.0, 0.5, 1.0)] == [1, 1.9375, 5]
    assert STEP.tokens_per_s(2, 200, 4, 1.0) == pytest.approx(1e3 * 10 / STEP(2, 200, 4))


def test_drafts_pay_where_weights_are_what_a_step_reads() -> None:
    """At one row the more the oftener they are right; at a large batch, whose tokens take time each, hardly any."""
    alone = [STEP.best_drafts(1, 200, 8, rate) for rate in (0.0, 0.5, 0.8, 0.95)]
    assert alone == sorted(alone)
    assert alone[0] == 0
    assert alone[-1] >= 5
    assert STEP.best_drafts(256, 200, 8, 0.6) <= 1
