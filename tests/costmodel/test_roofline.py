"""Roofline predictions grow with what they should, and learn from what is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.costmodel.hardware import Hardware
from quire.costmodel.roofline import Correction, Roofline
from quire.models.spec import read_spec
from tests.checkpoints import make_llama

HARDWARE = Hardware(flops=1e9, bandwidth=1e9, host_bandwidth=1e8, overhead_ms=0.5)


@pytest.fixture(scope="module")
def roofline(tmp_path_factory: pytest.TempPathFactory) -> Roofline:
    spec = read_spec(make_llama(tmp_path_factory.mktemp("llama") / "model", tokenizer=False))
    return Roofline(spec, "float32", HARDWARE, block_size=16)


def test_few_rows_cost_the_weights_and_many_the_products(roofline: Roofline) -> None:
    assert roofline.step_ms(1, 0) == roofline.step_ms(2, 0)
    assert roofline.step_ms(100, 0) > 20 * roofline.step_ms(1, 0)
    assert roofline.step_ms(1, 10_000) > roofline.step_ms(1, 0)


def test_tokens_cost_more_the_longer_their_context(roofline: Roofline) -> None:
    assert roofline.token_ms(10_000) > 2 * roofline.token_ms(0)
    assert roofline.recompute_ms(200) > 2 * roofline.recompute_ms(100)
    assert roofline.swap_ms(10) == 10 * roofline.swap_ms(1)


def test_steps_and_chunks_are_learned_apart(tmp_path: Path) -> None:
    spec = read_spec(make_llama(tmp_path / "model", tokenizer=False))
    roofline = Roofline(spec, "float32", HARDWARE, 16)
    token = roofline.token_ms(0)
    for _ in range(50):
        roofline.learn(roofline.step_ms(4, 100), 0.0, measured_ms=30.0)
    assert roofline.step_ms(4, 100) == pytest.approx(30.0, rel=0.01)
    assert roofline.token_ms(0) == token
    for _ in range(50):
        chunk = 100 * roofline.token_ms(0)
        roofline.learn(roofline.step_ms(4, 100), chunk, measured_ms=roofline.step_ms(4, 100) + 7.0)
    assert 100 * roofline.token_ms(0) == pytest.approx(7.0, rel=0.05)


def test_a_stall_of_the_machine_teaches_nothing() -> None:
    correction = Correction()
    correction.learn(1.0, 1_000.0)
    assert correction.factor == 1.0
