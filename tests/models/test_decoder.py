"""Logits of the decoder against transformers', position by position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.models.rope import rotary_frequencies
from quire.models.rope_spec import Llama3Scaling, RopeSpec
from tests.checkpoints import make_llama
from tests.models.forward import logits_of


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"rope": "llama3", "max_len": 2048},
        {"tie": True, "head_dim": 24, "kv_heads": 1},
        {"attention_bias": True, "mlp_bias": True, "shards": "50KB"},
    ],
)
@torch.inference_mode()
def test_logits_equal_transformers(flags: dict[str, Any], tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    directory = make_llama(tmp_path, tokenizer=False, **flags)
    tokens = torch.randint(3, 320, (150,), generator=torch.Generator().manual_seed(4))
    ours = logits_of(directory, tokens, torch.float32)
    theirs = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)(tokens.unsqueeze(0)).logits[0]
    assert ours.shape == (150, 320)
    assert ((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5
    assert torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs) < 1e-5


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        Llama3Scaling(8.0, 1.0, 4.0, 64),
        Llama3Scaling(32.0, 1.0, 4.0, 8192),
        Llama3Scaling(16.0, 1.0, 1.0, 8192),  # Llama 4 Scout's
    ],
)
def test_frequencies_equal_transformers(scaling: Llama3Scaling | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 5e5}
    if scaling is not None:
        parameters |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_len,
        }
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=parameters)
    theirs = LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(rotary_frequencies(RopeSpec(5e5, scaling), 128), theirs, rtol=1e-6, atol=0)
