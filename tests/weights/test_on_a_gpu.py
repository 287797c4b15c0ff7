"""Weights on a card: files and dummies, compared with what the processor reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.foundation.clock import SystemClock
from quire.models.layers.layer import load_all_weights
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.dummy import SPREAD, DummyCheckpoint
from quire.models.weights.gpu_loader import BUFFER_BYTES, BUFFERS
from quire.models.weights.progress import ReadingProgress
from quire.models.weights.safetensors import SafetensorsCheckpoint
from quire.models.weights.safetensors_files import SINGLE

pytestmark = pytest.mark.gpu

SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "norm": (4_096,),
    "odd": (127, 129),
    "many buffers": (3, BUFFER_BYTES // 64, 33),
    "more than all buffers": (BUFFERS + 3, BUFFER_BYTES // 4),
}


class OneTensor:
    """A layer that loads one tensor and then computes with it, as those do that pack."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype

    def weight_specs(self) -> list[WeightSpec]:  # type: ignore[override]
        return [WeightSpec(self.name, SHAPES[self.name])]

    def load_weights(self, checkpoint: Checkpoint) -> None:
        weight = torch.full(SHAPES[self.name], float("nan"), dtype=self.dtype, device="cuda")
        checkpoint.read(self.name, weight)
        self.packed = weight * 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("weights")
    save_file({name: torch.randn(shape) for name, shape in SHAPES.items()}, directory / SINGLE)
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_layers_have_theirs_when_they_are_pulled(directory: Path, dtype: torch.dtype) -> None:
    checkpoint = SafetensorsCheckpoint(directory)
    layers = [OneTensor(name, dtype) for name in SHAPES for _ in range(5)]
    load_all_weights(layers, checkpoint, 8, ReadingProgress(1, SystemClock(), False))  # type: ignore[arg-type]
    for layer in layers:
        checkpoint.read(layer.name, expected := torch.empty(SHAPES[layer.name], dtype=dtype))
        assert torch.equal(layer.packed.cpu(), expected * 2), layer.name
    checkpoint.close()


def test_windows_and_gaps(directory: Path) -> None:
    checkpoint = SafetensorsCheckpoint(directory)
    checkpoint.read("odd", whole := torch.empty(SHAPES["odd"]))
    checkpoint.read("odd", window := torch.empty(20, 30, device="cuda"), (100, 99))
    assert torch.equal(window.cpu(), whole[100:120, 99:129])
    around = torch.zeros(127, 140, device="cuda", dtype=torch.bfloat16)
    checkpoint.read("odd", around[:, 5:134])
    assert torch.equal(around[:, 5:134].cpu(), whole.bfloat16())
    assert around[:, :5].eq(0).all()
    checkpoint.close()


def test_dummies_are_drawn_on_the_card() -> None:
    specs = [WeightSpec("a", (500, 300)), WeightSpec("b", (500, 300))]
    drawn = {}
    for name in ("a", "b"):
        drawn[name] = torch.full((500, 300), 7.0, dtype=torch.bfloat16, device="cuda")
        DummyCheckpoint(specs, 0).read(name, drawn[name])
        assert drawn[name].abs().max() <= SPREAD
        assert (drawn[name].double().std() - SPREAD / 3**0.5).abs() < 0.01 * SPREAD
    assert not torch.equal(drawn["a"], drawn["b"])
