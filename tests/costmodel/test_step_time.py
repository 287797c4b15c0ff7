"""Whole steps: the parts add up, and grow with what they should."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.models.spec import read_spec
from quire.planning.costmodel.cards import CARDS, GPU_SHARES, card
from quire.planning.costmodel.hardware import GPUS
from quire.planning.costmodel.step_time import StepTime

MODELS = Path(__file__).parents[2] / "quire" / "tools" / "sizing" / "measured"
LLAMA = read_spec(MODELS / "llama-3.1-8b")
PERFECT = replace(
    GPU_SHARES, products=1.0, scores=1.0, weights=1.0, kv_cache=1.0, overlap=100.0, layer_ms=0.0, row_ms=0.0
)
STEP = StepTime(LLAMA, "bfloat16", GPUS["H200"], "bfloat16", GPU_SHARES)


def test_without_losses_a_step_takes_its_bytes_or_its_operations() -> None:
    hardware = replace(GPUS["H200"], overhead_ms=0.0)
    step = StepTime(LLAMA, "bfloat16", hardware, "bfloat16", PERFECT)
    weights = LLAMA.num_parameters - 128_256 * 4_096  # the embedding is looked up
    assert step.decode(1, 999) == pytest.approx(1e3 * (2 * weights + 131_072 * 1_000) / 4.25e12, rel=1e-3)
    head = 128_256 * 4_096
    operations = 2 * 4_096 * (weights - head) + 2 * head
    scores = 4 * 32 * 128 * 32 * 4_096**2 / 2
    assert step.prompt(4_096) == pytest.approx(1e3 * (operations + scores) / 690e12, rel=0.01)


def test_rows_one_by_one_are_the_rows_of_a_mixed_step() -> None:
    counts = np.array([1, 1, 1, 200], np.int64)
    before = np.array([500, 500, 500, 64], np.int64)
    assert STEP(counts, before, 3) == pytest.approx(STEP.mixed(3, 500, 200, 64))
    assert STEP(np.array([700], np.int64), np.array([300], np.int64), 1) == pytest.approx(STEP.prompt(700, 300))


def test_steps_take_longer_the_more_there_is_to_do() -> None:
    by_rows = [STEP.decode(rows, 200) for rows in (1, 2, 8, 64, 256)]
    by_context = [STEP.decode(8, context) for context in (10, 1_000, 50_000)]
    by_chunk = [STEP.mixed(8, 200, chunk, 0) for chunk in (0, 16, 256, 2_048)]
    for times in (by_rows, by_context, by_chunk):
        assert times == sorted(times)
    assert STEP.prompt(512, 30_000) > STEP.prompt(512, 0)


def test_a_window_bounds_what_a_step_attends_to() -> None:
    windowed = replace(
        LLAMA, layers=tuple(replace(layer, mixer=replace(layer.mixer, window=128)) for layer in LLAMA.layers)
    )
    step = StepTime(windowed, "bfloat16", GPUS["H200"], "bfloat16", GPU_SHARES)
    assert step.decode(8, 128) == pytest.approx(step.decode(8, 100_000))
    assert step.prompt(512, 200) == pytest.approx(step.prompt(512, 100_000))
    rows = np.array([1, 300], np.int64)
    assert step(rows, np.array([5_000, 5_000], np.int64), 2) == step(rows, np.array([9_000, 9_000], np.int64), 2)


def test_experts_that_a_step_does_not_use_are_not_read() -> None:
    mixture = read_spec(MODELS / "qwen3-30b-a3b")
    step = StepTime(mixture, "bfloat16", GPUS["H200"], "bfloat16", GPU_SHARES)
    assert step.decode(1, 100) < step.decode(32, 100) / 4


def test_the_measured_card_sustains_what_was_measured() -> None:
    assert card("H200").hardware.flops == pytest.approx(GPUS["H200"].flops)
    assert card("h200").hardware.bandwidth == pytest.approx(GPUS["H200"].bandwidth)
    assert [each.name for each in CARDS.values() if each.is_measured] == ["NVIDIA H200"]
    with pytest.raises(ConfigError, match="h200"):
        card("tpu")
