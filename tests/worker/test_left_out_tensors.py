"""Tensors that no model reads are compared with what is computed in their place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.models.spec import read_spec
from quire.models.weights.safetensors import SafetensorsCheckpoint
from quire.models.weights.safetensors_files import SINGLE
from quire.runtime.worker.weight_loading import left_out
from tests.checkpoints import make_llama, make_tiny

INV_FREQ = "model.layers.{}.self_attn.rotary_emb.inv_freq"
FREQUENCIES = 1e4 ** (-torch.arange(0, 16, 2) / 16)


def lines_of(directory: Path, tensors: dict[str, Tensor]) -> list[str]:
    save_file(load_file(directory / SINGLE) | tensors, directory / SINGLE)
    return list(left_out(SafetensorsCheckpoint(directory), read_spec(directory)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_old_checkpoints_have_the_frequencies_that_are_computed(dtype: torch.dtype, tmp_path: Path) -> None:
    directory = make_llama(tmp_path, tokenizer=False)
    assert lines_of(directory, {INV_FREQ.format(0): FREQUENCIES.to(dtype)}) == []


def test_frequencies_before_scaling_are_theirs_too(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    directory = make_llama(tmp_path, tokenizer=False, rope=rope)
    assert lines_of(directory, {INV_FREQ.format(0): FREQUENCIES, INV_FREQ.format(1): FREQUENCIES / 4}) == []


def test_other_frequencies_are_said_by_name(tmp_path: Path) -> None:
    directory = make_llama(tmp_path, tokenizer=False)
    (line,) = lines_of(directory, {INV_FREQ.format(n): FREQUENCIES**1.2 for n in (0, 1)})
    assert line.startswith("model.layers.0.self_attn.rotary_emb.inv_freq and 1 more: not the rotary frequencies")


def test_masks_are_compared(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, "GPT2LMHeadModel")
    mask, name = torch.ones(1, 1, 8, 8).tril(), "transformer.h.{}.attn.bias"
    right = {
        name.format(0): mask,
        name.format(1): mask.to(torch.int64),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    assert lines_of(directory, right) == []
    assert lines_of(directory, {name.format(1): mask.to(torch.uint8)}) == []
    (line,) = lines_of(directory, {name.format(1): torch.ones(1, 1, 8, 8, dtype=torch.bool)})
    assert line.startswith("transformer.h.1.attn.bias: not a causal mask")
    assert len(lines_of(directory, {"transformer.h.0.attn.masked_bias": torch.tensor(0.0)})) == 2
