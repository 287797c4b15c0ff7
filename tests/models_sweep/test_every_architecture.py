"""Every native architecture against transformers: weights, keys, logits, generated tokens, and parts on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quire.models.spec import read_spec
from tests.checkpoints import make_tiny
from tests.models.forward import logits_of, logits_of_ranks
from tests.models_sweep.renamed import make_renamed
from tests.models_sweep.rows import ROWS, SHAPE
from tests.parity.oracle import Oracle
from tests.parity.test_architectures import assert_parity

TOKENS = torch.randint(3, 320, (150,), generator=torch.Generator().manual_seed(4))
pytestmark = [pytest.mark.models, pytest.mark.parametrize("architecture", ROWS)]


@pytest.fixture
def checkpoints(architecture: str, tmp_path: Path) -> tuple[Path, Path]:
    """The architecture's checkpoint, and the one that transformers reads."""
    torch.set_num_threads(1)
    shape = SHAPE | ROWS[architecture]
    if like := shape.pop("like", None):
        return make_renamed(tmp_path, architecture, like, shape)
    return (make_tiny(tmp_path, architecture, **shape),) * 2


@pytest.fixture
def checkpoint(checkpoints: tuple[Path, Path]) -> Path:
    return checkpoints[0]


def difference(logits: torch.Tensor, others: torch.Tensor) -> float:
    """The largest difference, as a part of the largest logit."""
    return float((logits - others).abs().max() / others.abs().max())


def distance(logits: torch.Tensor, others: torch.Tensor) -> float:
    """The norm of the difference, as a part of the norm of the logits.

    Sums of two ranks round in another order than sums of one. Where a model does not scale its attention scores, a
    single position may turn the last bit of each weight into 4e-5 of the largest logit, however the sums are ordered.
    What a rank leaves out or adds twice, of one position or of one token of the vocabulary, is thousands of times more
    than either.
    """
    return float((logits.double() - others.double()).norm() / others.double().norm())


def test_weights_are_counted(checkpoint: Path) -> None:
    spec = read_spec(checkpoint)
    header, _ = json.JSONDecoder().raw_decode((checkpoint / "model.safetensors").read_bytes()[8:].decode("latin-1"))
    spans = [at["data_offsets"] for name, at in header.items() if name[:2] != "__" and not name.startswith(spec.unread)]
    assert spec.weight_bytes("float32") == sum(end - begin for begin, end in spans)


@torch.inference_mode()
def test_logits(checkpoints: tuple[Path, Path]) -> None:
    checkpoint, reference = checkpoints
    theirs = Oracle(reference).logits(TOKENS.tolist())
    assert difference(logits_of(checkpoint, TOKENS, torch.float32).double(), theirs) < 1e-4


def test_tokens(checkpoints: tuple[Path, Path]) -> None:
    assert_parity(*checkpoints)


@torch.inference_mode()
def test_divided(checkpoint: Path) -> None:
    whole = logits_of(checkpoint, TOKENS, torch.float32)
    for ep in (1, 2) if read_spec(checkpoint).mixture else (1,):
        first, second = logits_of_ranks(checkpoint, TOKENS, torch.float32, 2, ep=ep)
        assert distance(first, whole) < 2e-5
        assert torch.equal(first, second)
