"""Recorded steps give what others give. On a CPU what was recorded is simply run again, on the columns of the day."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from quire.worker import runner
from quire.worker.graphs import DecodeGraphs
from tests.checkpoints import make_llama
from tests.worker.driver import Driver, Sequence, config_for

SIZES = [1, 4, 8]


class RunAgain(DecodeGraphs):
    """What was recorded is kept as it is."""

    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes)
        self._steps: dict[int, Callable[[], Tensor]] = {}
        self.replayed: list[int] = []

    def record(self, rows: int, forward: Callable[[], Tensor]) -> None:
        self._steps[rows] = forward

    def replay(self, rows: int) -> Tensor:
        self.replayed.append(rows)
        return self._steps[rows]()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tiny"), tokenizer=False)


PLAIN: list[dict[str, Any]] = [
    {},
    {"temperature": 1.3, "seed": 7},
    {"temperature": 0.8, "top_k": 5, "seed": 3},
    {"temperature": 2.0, "top_p": 0.9, "min_p": 0.01, "seed": 11},
    {"temperature": 1.0, "seed": 2**64 - 1},
]
REPORTING: list[dict[str, Any]] = [{"logprobs": 2}, {}, {"temperature": 0.7, "logprobs": 0, "seed": 5}]
RULED: list[dict[str, Any]] = [
    {"presence_penalty": 1.5, "prompt_len": 3, "history": [5, 6, 7]},
    {"temperature": 1.1, "seed": 4},
    {"logit_bias": {9: 30.0}},
]


def texts(
    tiny: Path, owners: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, *, recorded: bool, mode: str
) -> tuple[list[Sequence], list[int]]:
    """What sequences draw in 12 steps: the first ones together, then one joins, then one is left."""
    monkeypatch.setattr(runner, "DecodeGraphs", RunAgain)
    driver = Driver(config_for(tiny, logprobs_mode=mode))
    if recorded:
        driver.worker._runner.record(SIZES)
    sequences = [driver.admit(slot, [5, 6, 7 + slot], **owner) for slot, owner in enumerate(owners)]
    driver.generate(sequences[:-1], 5)
    driver.generate(sequences, 9)
    driver.generate(sequences[:1], 12)
    return sequences, driver.worker._runner._graphs.replayed  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("owners", [PLAIN, REPORTING, RULED, PLAIN[:2] + RULED + REPORTING])
def test_recorded_steps_draw_and_report_the_same(
    owners: list[dict[str, Any]], mode: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, none = texts(tiny, owners, monkeypatch, recorded=False, mode=mode)
    again, replayed = texts(tiny, owners, monkeypatch, recorded=True, mode=mode)
    assert not none
    assert len(set(replayed)) > 1
    assert [s.drawn for s in again] == [s.drawn for s in plain]
    for one, other in zip(again, plain, strict=True):
        assert len(one.logprobs) == len(other.logprobs)
        for entry, same in zip(one.logprobs, other.logprobs, strict=True):
            assert (entry is None) == (same is None)
            if entry is not None and same is not None:
                assert (entry.rank, entry.top_ids) == (same.rank, same.top_ids)
                assert [entry.logprob, *entry.top_logprobs] == pytest.approx(
                    [same.logprob, *same.top_logprobs], abs=1e-4
                )
    assert len({tuple(s.drawn) for s in plain}) == len(plain)
