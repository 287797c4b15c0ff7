"""Weights that float16 does not hold are refused by name; others, and other dtypes, are read as ever."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import CheckpointError
from quire.models.weights.float16_range import refusing_overflow
from quire.models.weights.safetensors import SafetensorsCheckpoint
from quire.models.weights.safetensors_files import SINGLE


def checkpoint_of(directory: Path, **tensors: torch.Tensor) -> SafetensorsCheckpoint:
    save_file(tensors, directory / SINGLE)
    return SafetensorsCheckpoint(directory)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sign", [1, -1])
def test_what_overflows_is_refused_by_name(stored: torch.dtype, sign: int, tmp_path: Path) -> None:
    large = torch.zeros(4, 4, dtype=stored)
    large[2, 3] = 1e5 * sign
    checkpoint = checkpoint_of(tmp_path, large=large, small=torch.full((4,), 6e4, dtype=stored))

    def read_all() -> None:
        with refusing_overflow(checkpoint, torch.float16) as checked:
            for name, shape in (("small", (4,)), ("large", (4, 4))):
                checked.read(name, torch.empty(shape, dtype=torch.float16))

    with pytest.raises(CheckpointError, match=r"^large: values beyond .*--dtype bfloat16"):
        read_all()


def test_what_is_elsewhere_or_wide_enough_is_not_looked_at(tmp_path: Path) -> None:
    large = torch.tensor([[1.0, 2.0], [1e5, 4.0]])
    checkpoint = checkpoint_of(tmp_path, large=large, half=torch.tensor([torch.inf]).half())
    with refusing_overflow(checkpoint, torch.float16) as checked:
        checked.read("large", own := torch.empty(1, 2, dtype=torch.float16))
        checked.read("large", wide := torch.empty(2, 2))
        checked.read("half", torch.empty(1, dtype=torch.float16))
    with refusing_overflow(checkpoint, torch.bfloat16) as checked:
        checked.read("large", torch.empty(2, 2, dtype=torch.bfloat16))
    assert own.tolist() == [[1.0, 2.0]]
    assert torch.equal(wide, large)
