"""Quantized weights that ranks divide: the same logits, or a refusal that says what cannot be cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import CheckpointError
from tests.checkpoints import make_llama
from tests.models.forward import logits_of, logits_of_ranks
from tests.quantization import made
from tests.quantization.test_checkpoints import TOKENS, WEIGHT_ONLY, WITH_ACTIVATIONS, error

SHAPE: dict[str, Any] = {"hidden": 256, "heads": 4, "kv_heads": 2, "intermediate": 512, "layers": 1, "tokenizer": False}
REORDERED = ("gptq, act-order", "compressed, act-order")


@pytest.mark.parametrize("case", [case for case in WEIGHT_ONLY if case not in REORDERED])
@torch.inference_mode()
def test_integers_are_cut_where_groups_end(case: str, tmp_path: Path) -> None:
    config, make = WEIGHT_ONLY[case]
    directory = make_llama(tmp_path / "model", **SHAPE)
    made.quantize(directory, config, make)
    whole = logits_of(directory, TOKENS, torch.float32)
    first, second = logits_of_ranks(directory, TOKENS, torch.float32, 2)
    assert float((first - whole).abs().max() / whole.abs().max()) < 1e-5
    assert torch.equal(first, second)


@pytest.mark.parametrize("case", WITH_ACTIVATIONS)
@torch.inference_mode()
def test_eight_bits_with_activations(case: str, tmp_path: Path) -> None:
    """Each rank has a scale of its own for its part of a row of activations: other errors, and no larger ones."""
    config, make = WITH_ACTIVATIONS[case]
    directory = make_llama(tmp_path / "model", **SHAPE)
    dense = made.quantize(directory, config, make)
    whole = error(logits_of(directory, TOKENS, torch.float32), dense)
    first, second = logits_of_ranks(directory, TOKENS, torch.float32, 2)
    assert error(first, dense) < 1.1 * whole
    assert torch.equal(first, second)


@pytest.mark.parametrize("case", REORDERED)
@torch.inference_mode()
def test_reordered_columns_are_refused(case: str, tmp_path: Path) -> None:
    config, make = WEIGHT_ONLY[case]
    directory = make_llama(tmp_path / "model", **SHAPE)
    made.quantize(directory, config, make)
    with pytest.raises(CheckpointError, match=r"o_proj\.\w*g_idx .* must not be reordered"):
        logits_of_ranks(directory, TOKENS, torch.float32, 2)


@torch.inference_mode()
def test_groups_that_ranks_would_cut_are_refused(tmp_path: Path) -> None:
    config, make = WEIGHT_ONLY["compressed"]  # groups of 128
    directory = make_llama(tmp_path / "model", **SHAPE)
    made.quantize(directory, config, make)
    with pytest.raises(CheckpointError, match="128"):
        logits_of_ranks(directory, TOKENS, torch.float32, 4)
