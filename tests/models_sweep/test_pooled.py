"""Every native architecture that makes vectors or values of texts, against transformers: outputs, and two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.collectives.in_threads import run_ranks
from tests.models.forward import load
from tests.models.pooled import make_pooled, near, outputs_of, reference_outputs, stored_weights, texts
from tests.models_sweep.pooled_rows import POOLED_ROWS

WITHOUT_REFERENCE = [name for name in POOLED_ROWS if "Reward" in name]
"""Whose head transformers lacks; tests/models/test_encoders.py has one."""
pytestmark = [
    pytest.mark.models,
    pytest.mark.parametrize("architecture", [name for name in POOLED_ROWS if name not in WITHOUT_REFERENCE]),
]


@torch.inference_mode()
def test_outputs(architecture: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    directory, reference = make_pooled(tmp_path, architecture, POOLED_ROWS[architecture])
    rows, loaded = texts(), load(directory)
    for own, other in zip(outputs_of(loaded, rows), reference_outputs(reference, loaded, rows), strict=True):
        near(own, other)
    if "Masked" not in architecture:  # whose table is read twice
        assert loaded.spec.num_parameters == stored_weights(reference, loaded)


@torch.inference_mode()
def test_pooled_divided(architecture: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    directory, _ = make_pooled(tmp_path, architecture, POOLED_ROWS[architecture])
    rows = texts()
    whole = outputs_of(load(directory), rows)
    parts = run_ranks(
        2, lambda mesh, ranks: outputs_of(load(directory, mesh=mesh, collectives=ranks), rows), patience_s=5.0
    )
    for own, first, second in zip(whole, *parts, strict=True):
        near(first, own)
        assert torch.equal(first, second)
