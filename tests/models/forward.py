"""One forward pass of a model over a sequence, on hand-made blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quire.compute.attention.backend import StepRows
from quire.compute.attention.cpu import CpuAttention
from quire.compute.collectives.collectives import Collectives
from quire.compute.mesh import Mesh
from quire.foundation.clock import SystemClock
from quire.models.layers.factory import LayerFactory
from quire.models.layers.layer import load_all_weights, weight_specs_of
from quire.models.layers.rotary import Positions
from quire.models.model import build_model
from quire.models.rank_share import rank_share
from quire.models.spec import read_spec
from quire.models.weights.checkpoint import Checkpoint, check_weights
from quire.models.weights.gguf import GgufCheckpoint, find_gguf_files
from quire.models.weights.progress import ReadingProgress
from quire.models.weights.safetensors import SafetensorsCheckpoint
from quire.models.weights.standard_names import with_standard_names
from quire.models.weights.tensor_options import TensorOptions
from quire.runtime.worker.kv_tensors import allocate_kv_cache, kv_view
from tests.collectives.in_threads import run_ranks

CPU = torch.device("cpu")


def logits_of(directory: Path, tokens: Tensor, dtype: torch.dtype, quantization: str | None = None) -> Tensor:
    """[length, vocab_size], of tokens [length] read at once."""
    return _logits(directory, tokens, dtype, quantization)


def logits_of_ranks(
    directory: Path, tokens: Tensor, dtype: torch.dtype, tp: int, quantization: str | None = None, *, ep: int = 1
) -> list[Tensor]:
    """The same of each of `tp` ranks that divide the model."""
    spec = read_spec(directory, quantization)
    return run_ranks(
        tp,
        lambda mesh, ranks: _logits(directory, tokens, dtype, quantization, mesh, ranks),
        ep=ep,
        vocab_size=spec.vocab_size,
        patience_s=5.0,
    )


def _logits(
    directory: Path,
    tokens: Tensor,
    dtype: torch.dtype,
    quantization: str | None,
    mesh: Mesh | None = None,
    collectives: Collectives | None = None,
) -> Tensor:
    whole, length = read_spec(directory, quantization), len(tokens)
    factory = LayerFactory(TensorOptions(CPU, dtype), whole.quantization, mesh, collectives)
    model = build_model(whole, factory)
    spec = rank_share(whole, mesh or Mesh())
    is_gguf = bool(find_gguf_files(directory))
    checkpoint: Checkpoint = (
        GgufCheckpoint(directory)
        if is_gguf
        else with_standard_names(
            SafetensorsCheckpoint(directory),
            tied=spec.tie_embeddings,
            left_out=spec.mtp_layers,
            expert=spec.family.modules.expert,
            transposed_experts=spec.family.modules.transposed_experts,
            others=spec.family.modules.others,
            older=spec.family.modules.older,
        )
    )
    check_weights(checkpoint, weight_specs_of(factory.layers), spec.architecture)
    load_all_weights(factory.layers, checkpoint, 2, ReadingProgress(1, SystemClock(), False))
    blocks, groups = -(-length // 16), len(spec.kv_groups())
    backend = CpuAttention(kv_view(allocate_kv_cache(spec, blocks * groups, 16, dtype, CPU), spec))
    positions = torch.arange(length)
    backend.prepare(
        StepRows(
            counts=np.array([length]),
            row_of_token=np.zeros(length, dtype=np.int64),
            bounds=np.zeros(1, dtype=np.int64),
            slot_of_token=torch.zeros(length, dtype=torch.int64),
            starts=torch.tensor([0]),
            positions=positions,
            slots=torch.tensor([0]),
            device_counts=torch.tensor([length]),
            tables=tuple((1 + g * blocks + torch.arange(blocks)).unsqueeze(0) for g in range(groups)),
        )
    )
    lengths = positions.clamp(min=length) if spec.rope_length_mode else None
    return model.logits(model.hidden(tokens, Positions(positions, lengths), backend))
