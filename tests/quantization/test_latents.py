"""Attention over latents with quantized weights: what makes keys and values of latents is made dense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import CheckpointError
from tests.checkpoints import make_tiny
from tests.models.forward import logits_of, logits_of_ranks
from tests.quantization import made
from tests.quantization.test_checkpoints import TOKENS, WEIGHT_ONLY, WITH_ACTIVATIONS, error

SHAPE: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": 128,
    "intermediate_size": 256,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 64,
    "first_k_dense_replace": 2,
    "num_hidden_layers": 2,
}


@pytest.mark.parametrize("case", ["fp8, blocks", "fp8, channels"])
@torch.inference_mode()
def test_fp8_is_within_its_rounding(case: str, tmp_path: Path) -> None:
    config, make = WITH_ACTIVATIONS[case]
    directory = make_tiny(tmp_path / "model", "DeepseekV3ForCausalLM", std=0.05, **SHAPE)
    dense = made.quantize(directory, config, make)
    whole = logits_of(directory, TOKENS, torch.float32)
    assert error(whole, dense) < 0.06
    for part in logits_of_ranks(directory, TOKENS, torch.float32, 2):
        assert torch.linalg.vector_norm(part - whole) / torch.linalg.vector_norm(whole) < 0.03


def test_other_forms_are_refused_by_name(tmp_path: Path) -> None:
    config, make = WEIGHT_ONLY["gptq, one group"]
    directory = make_tiny(tmp_path / "model", "DeepseekV3ForCausalLM", **SHAPE)
    made.quantize(directory, config, make)
    with pytest.raises(CheckpointError, match="kv_b_proj is quantized in a form that is not supported for latents"):
        logits_of(directory, TOKENS, torch.float32)
