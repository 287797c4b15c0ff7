"""Which steps run before they are captured."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.models.lora.step_tiles import Adapted
from quire.runtime.worker import buffer_ring, model_runner
from quire.runtime.worker.buffer_ring import BufferRing
from quire.runtime.worker.graph_shapes import GraphShape, GraphShapes
from quire.runtime.worker.model_runner import ModelRunner
from quire.runtime.worker.startup.starting_runner import StartingRunner
from quire.runtime.worker.step import Step
from tests.checkpoints import make_llama
from tests.worker.driver import Driver, config_for
from tests.worker.replay_by_running import ReplayByRunning

MOST = 128


class LateRing(BufferRing):
    """Of a device that runs nothing until it is awaited: no buffer that it has yet to copy may be written."""

    _begun = 0

    def await_device(self) -> None:
        self._begun = self._host_steps

    def advance(self) -> int:
        assert self._host_steps - self._begun < self.size
        return super().advance()


@pytest.mark.parametrize("precompiled", [False, True])
def test_of_precompiled_shapes_the_largest_of_each_kind_runs_before_capture(
    precompiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[int, int]] = []

    def run(self: ModelRunner, step: Step) -> None:
        step.staged.copy_to_device()
        ran.append((len(step.host.token_ids), len(step.host.slots)))

    monkeypatch.setattr(ModelRunner, "_compute", run)
    too_large: list[list[int]] = []
    monkeypatch.setattr(StartingRunner, "run_dummies", lambda self, counts, **_: too_large.append(list(counts)))
    runner = Driver(config_for(make_llama(tmp_path, tokenizer=False), enforce_eager=True)).worker._runner
    graphs = ReplayByRunning.put_into(runner)
    runner.capture_graphs(MOST, precompiled=precompiled)
    limits = runner._limits
    shapes = GraphShapes(MOST, limits.rows, limits.tokens, limits.length).all()
    assert list(graphs.steps) == [(shape, Adapted.NOTHING) for shape in shapes]
    expected: dict[object, GraphShape] = {}
    for shape in shapes:
        expected.setdefault(shape.kind if precompiled else shape, shape)
    assert ran == [(shape.tokens, shape.rows) for shape in expected.values()]
    assert (len(ran) == 3) == precompiled
    assert {shape.tokens for shape in expected.values()} >= {max(shape.tokens for shape in shapes)}
    assert too_large == [[MOST + 1]], "too large to be captured, and launched once as others will be"


def test_steps_with_adapters_are_captured_beside_those_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Adapted] = []

    def run(self: ModelRunner, step: Step) -> None:
        step.staged.copy_to_device()
        found.append(step.adapted)
        assert (step.inputs.tiles is None) == (step.adapted is Adapted.NOTHING)

    monkeypatch.setattr(ModelRunner, "_compute", run)
    monkeypatch.setattr(StartingRunner, "run_dummies", lambda self, counts, **_: None)
    config = config_for(make_llama(tmp_path, tokenizer=False), enforce_eager=True, enable_lora=True)
    runner = Driver(config).worker._runner
    graphs = ReplayByRunning.put_into(runner)
    runner.capture_graphs(MOST)
    limits = runner._limits
    shapes = GraphShapes(MOST, limits.rows, limits.tokens, limits.length).all()
    kinds = [Adapted.NOTHING, Adapted.PROJECTIONS]
    assert list(graphs.steps) == [(shape, adapted) for shape in shapes for adapted in kinds]
    assert found == kinds * len(shapes)


def test_steps_of_the_dummy_wait_for_a_slow_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapters there are two of each size, more than there are buffers, and nobody asks for their results."""
    monkeypatch.setattr(model_runner, "BufferRing", LateRing)
    monkeypatch.setattr(buffer_ring, "_has_memory", lambda device: True)
    config = config_for(make_llama(tmp_path, tokenizer=False), enforce_eager=True, enable_lora=True)
    runner = Driver(config).worker._runner
    ring = runner._ring
    before = ring._host_steps
    runner.run_largest()
    assert ring._host_steps - before == 6 > ring.size
