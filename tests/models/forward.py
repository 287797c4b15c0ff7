"""One forward pass of a model over a sequence, on hand-made blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import Rows
from quire.attention.cpu import CpuAttention
from quire.clock import SystemClock
from quire.layers.factory import LayerFactory
from quire.layers.layer import load_all_weights, weight_specs_of
from quire.layers.positions import Positions
from quire.models.model import build_model
from quire.models.spec import read_spec
from quire.weights.checkpoint import check_weights
from quire.weights.progress import ReadingProgress
from quire.weights.safetensors import SafetensorsCheckpoint
from quire.weights.tensor_options import TensorOptions
from quire.worker.kv_tensors import allocate_kv_cache, kv_view

CPU = torch.device("cpu")


def logits_of(directory: Path, tokens: Tensor, dtype: torch.dtype, quantization: str | None = None) -> Tensor:
    """[length, vocab_size], of tokens [length] read at once."""
    spec, length = read_spec(directory, quantization), len(tokens)
    factory = LayerFactory(TensorOptions(CPU, dtype), spec.quantization)
    model = build_model(spec, factory)
    checkpoint = SafetensorsCheckpoint(directory)
    check_weights(checkpoint, weight_specs_of(factory.layers), spec.architecture)
    load_all_weights(factory.layers, checkpoint, 2, ReadingProgress(1, SystemClock(), False))
    blocks, groups = -(-length // 16), len(spec.kv_groups())
    backend = CpuAttention(kv_view(allocate_kv_cache(spec, blocks * groups, 16, dtype, CPU), spec))
    positions = torch.arange(length)
    backend.prepare(
        Rows(
            counts=np.array([length]),
            row_of_token=np.zeros(length, dtype=np.int64),
            bounds=np.zeros(1, dtype=np.int64),
            slot_of_token=torch.zeros(length, dtype=torch.int64),
            starts=torch.tensor([0]),
            positions=positions,
            slots=torch.tensor([0]),
            tables=tuple((1 + g * blocks + torch.arange(blocks)).unsqueeze(0) for g in range(groups)),
        )
    )
    lengths = positions.clamp(min=length) if spec.rope_length_mode else None
    return model.logits(model.hidden(tokens, Positions(positions, lengths), backend))
