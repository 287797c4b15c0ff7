"""Which steps run before they are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.worker.batch import HostBatch
from quire.worker.graph_shapes import GraphShape, GraphShapes
from quire.worker.model_runner import ModelRunner, _Laid
from tests.checkpoints import make_llama
from tests.worker.driver import Driver, config_for
from tests.worker.run_again import ReplayByRunning

MOST = 128


@pytest.mark.parametrize("rehearsed", [False, True])
def test_of_what_is_rehearsed_the_largest_of_each_kind(
    rehearsed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[int, int]] = []

    def run(self: ModelRunner, host: HostBatch, laid: _Laid) -> None:
        ran.append((len(host.ids), len(host.slots)))

    monkeypatch.setattr(ModelRunner, "_draw_all", run)
    monkeypatch.setattr(ModelRunner, "_lay", lambda *_: _Laid())
    too_large: list[list[int]] = []
    monkeypatch.setattr(ModelRunner, "run_dummies", lambda self, counts, **_: too_large.append(list(counts)))
    runner = Driver(config_for(make_llama(tmp_path, tokenizer=False))).worker._runner
    runner._graphs = graphs = ReplayByRunning()  # type: ignore[assignment]
    runner.record(MOST, rehearsed=rehearsed)
    largest = runner._largest
    shapes = GraphShapes(MOST, largest.rows, largest.tokens, largest.length).all()
    assert list(graphs._steps) == shapes
    expected: dict[object, GraphShape] = {}
    for shape in shapes:
        expected.setdefault(shape.kind if rehearsed else shape, shape)
    assert ran == [(shape.tokens, shape.rows) for shape in expected.values()]
    assert (len(ran) == 3) == rehearsed
    assert {shape.tokens for shape in expected.values()} >= {max(shape.tokens for shape in shapes)}
    assert too_large == [[MOST + 1]], "to be recorded, and launched once as others will be"
