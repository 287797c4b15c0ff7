"""Logits of the decoder against transformers', position by position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.attention.backend import KVView, Rows
from quire.attention.cpu import CpuAttention
from quire.clock import SystemClock
from quire.layers.factory import LayerFactory
from quire.layers.layer import Place, needs_of, pull_all
from quire.layers.positions import Positions
from quire.models.frequencies import rotary_frequencies
from quire.models.model import build_model
from quire.models.rope_spec import Llama3Scaling, RopeSpec
from quire.models.spec import read_spec
from quire.weights.checkpoint import check
from quire.weights.progress import ReadingProgress
from quire.weights.safetensors import SafetensorsCheckpoint
from tests.checkpoints import make_llama

CPU = torch.device("cpu")


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
    spec, length = read_spec(directory), 150
    factory = LayerFactory(Place(CPU, torch.float32))
    model = build_model(spec, factory)
    checkpoint = SafetensorsCheckpoint(directory)
    check(checkpoint, needs_of(factory.layers), spec.architecture)
    pull_all(factory.layers, checkpoint, 2, ReadingProgress(1, SystemClock(), False))

    shape = (spec.layers, 11, 16, spec.kv_heads, spec.head_dim)
    keys, values = torch.zeros(shape), torch.zeros(shape)
    backend = CpuAttention(KVView(tuple(keys), tuple(values), (0,) * spec.layers, (None,), 16))
    positions = torch.arange(length)
    backend.prepare(
        Rows(
            counts=np.array([length]),
            row_of_token=np.zeros(length, dtype=np.int64),
            starts=torch.tensor([0]),
            positions=positions,
            slots=torch.tensor([0]),
            tables=(torch.arange(1, 11).unsqueeze(0),),
        )
    )
    tokens = torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(4))
    ours = model.logits(model.hidden(tokens, Positions(positions), backend))
    theirs = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)(tokens.unsqueeze(0)).logits[0]
    assert ours.shape == (length, spec.vocab_size)
    assert ((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5
    assert torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs) < 1e-5


@pytest.mark.parametrize("scaling", [None, Llama3Scaling(8.0, 1.0, 4.0, 64), Llama3Scaling(32.0, 1.0, 4.0, 8192)])
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
