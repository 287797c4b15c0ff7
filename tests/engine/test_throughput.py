"""How fast the engine works off its queue, and what its clients are told about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.engine.step_stats import Throughput
from quire.foundation.messages.from_engine import EXPECTED_OUTPUT, Deltas, Load
from quire.models.spec import read_spec
from quire.planning.costmodel.hardware import GPUS
from quire.planning.costmodel.roofline import Roofline
from tests.engine.harness import Engine, add
from tests.models.test_published import PUBLISHED


class Steps:
    """Steps of 100 ms, each of so many tokens."""

    def __init__(self, estimate: float = 0.0) -> None:
        self.throughput = Throughput(estimate, now=0.0)
        self.now, self.total = 0.0, 0

    def run(self, tokens: int, seconds: float, *, saturated: bool = True, step_s: float = 0.1) -> float:
        for _ in range(round(seconds / step_s)):
            self.now += step_s
            self.total += tokens
            self.throughput.update(self.now, self.total, saturated=saturated)
        return self.throughput.tokens_per_s


def test_nothing_is_known_before_requests_wait() -> None:
    steps = Steps()
    assert steps.run(5, 60, saturated=False) == 0
    assert steps.run(200, 5) == pytest.approx(2_000)


def test_what_little_was_asked_for_says_nothing_about_what_is_possible() -> None:
    steps = Steps()
    steps.run(200, 5)
    assert steps.run(5, 600, saturated=False) == pytest.approx(2_000)


def test_the_estimate_is_soon_outweighed() -> None:
    steps = Steps(estimate=50_000)
    assert steps.throughput.tokens_per_s == 50_000
    assert steps.run(200, 1) < 27_000
    assert steps.run(200, 60) == pytest.approx(2_000, rel=0.05)


def test_the_mean_follows_what_changes() -> None:
    steps = Steps()
    steps.run(200, 60)
    assert steps.run(100, 2) > 1_700, "but not at once"
    assert steps.run(100, 40) == pytest.approx(1_000, rel=0.05)


def test_a_pause_is_no_work() -> None:
    steps = Steps()
    steps.run(200, 60)
    assert steps.run(200, 120, step_s=120) > 1_700


def test_the_engine_says_how_much_waits() -> None:
    engine = Engine(max_num_seqs=1, max_num_batched_tokens=64)
    loads: list[Load] = []
    engine.client.send(add(1, range(20), 10))
    engine.client.send(add(2, range(50), 30, forks=[3, 4]))
    engine.client.send(add(5, range(7), 400))
    while len(loads) < 120:
        if isinstance(message := engine.client.receive(0), Deltas):
            loads.append(message.load)
            last_add = message.last_add
    assert loads[0].queued_tokens == (50 + 30) + 2 * (1 + 30) + 7 + EXPECTED_OUTPUT
    learned = (EXPECTED_OUTPUT + 10) / 2
    assert loads[10].expected_output == learned
    assert loads[-1].queued_tokens == 0
    assert last_add == 5
    assert loads[-1].tokens_per_s > 0


def test_the_estimate_lets_in_a_thousand_requests_at_once(tmp_path: Path) -> None:
    """Llama-3.1-8B on an H200 and 1,000 × (512 + 128): nobody may be turned away."""
    config, *_ = PUBLISHED["Llama-3.1-8B"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    rate = Roofline(read_spec(tmp_path), "bfloat16", GPUS["H200"], 16).tokens_per_s(512)
    assert 30 * rate > 1_000 * (512 + 128)
    assert rate < 100_000
