"""The progress bar: on a terminal, once it takes long; never otherwise."""

from __future__ import annotations

import sys

import pytest
import torch

from quire.models.weights.checkpoint import ObservedReads, WeightSpec
from quire.models.weights.dummy import DummyCheckpoint
from quire.models.weights.progress import ReadingProgress


class Ticks:
    """A clock that goes on by itself."""

    def __init__(self, step: float) -> None:
        self.time, self.step = 0.0, step

    def now(self) -> float:
        self.time += self.step
        return self.time


@pytest.mark.parametrize(
    ("terminal", "visible", "step", "shown"),
    [(True, True, 0.3, True), (True, True, 0.01, False), (False, True, 0.3, False), (True, False, 0.3, False)],
)
def test_when_a_bar_is_shown(
    terminal: bool, visible: bool, step: float, shown: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    progress = ReadingProgress(4_000_000_000, Ticks(step), visible)
    with progress:
        for _ in range(4):
            progress.advance(1_000_000_000)
    assert progress.seconds == pytest.approx(5 * step)
    output = capsys.readouterr()
    assert output.out == ""
    assert ("4.00/4.00 GB" in output.err) == shown


def test_reads_count_by_the_bytes_that_weights_take_where_they_live() -> None:
    counts: list[int] = []
    progress = ReadingProgress(0, Ticks(0.0), visible=False)
    progress.advance = counts.append  # type: ignore[method-assign]
    checkpoint = ObservedReads(DummyCheckpoint([WeightSpec("a", (7, 4))], 0), progress.count)
    checkpoint.read("a", torch.empty(7, 4))
    checkpoint.read("a", out := torch.full((3, 4), 7.0, dtype=torch.bfloat16), (2, 0))
    assert counts == [7 * 4 * 4, 3 * 4 * 2]
    assert out.abs().max() < 0.1
