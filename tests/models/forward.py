"""One forward pass of a model over a sequence, on hand-made blocks."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend, StepRows
from quire.compute.attention.cpu import CpuAttention
from quire.compute.attention.sequence_states import AttentionBesideStates, SequenceStates
from quire.compute.collectives.collectives import Collectives
from quire.compute.kernels.reference.state_inputs import StateRows
from quire.compute.mesh import Mesh
from quire.foundation.clock import SystemClock
from quire.models.layers.factory import LayerFactory
from quire.models.layers.layer import load_all_weights, weight_specs_of
from quire.models.layers.rotary import Positions
from quire.models.model import Stage, build_model
from quire.models.rank_spec import rank_share
from quire.models.spec import ModelSpec, read_spec
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


def beside_states(backend: AttentionBackend, spec: ModelSpec, rows: int, dtype: torch.dtype) -> AttentionBackend:
    """The backend, with empty states of `rows` sequences if any layer keeps one; row i's is state i + 1."""
    if not spec.state_layers:
        return backend
    tensors = {
        number: tuple(
            torch.zeros((rows + 1, *plane.shape), dtype=getattr(torch, plane.element) if plane.element else dtype)
            for plane in spec.layers[number].mixer.state_form()
        )
        for number in spec.state_layers
    }
    return AttentionBesideStates(backend, SequenceStates(tensors))


def set_rows(backend: AttentionBackend, counts: list[int]) -> None:
    """Let a step have rows of so many tokens."""
    if isinstance(backend, AttentionBesideStates):
        starts = torch.tensor([0, *counts]).cumsum(0)
        backend.states.begin(StateRows(torch.arange(1, len(counts) + 1), starts))


class Loaded(NamedTuple):
    """A model with its weights, or a rank's part of it."""

    spec: ModelSpec
    model: Stage
    mesh: Mesh
    dtype: torch.dtype


def load(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    mesh: Mesh | None = None,
    collectives: Collectives | None = None,
) -> Loaded:
    """Build a directory's model, or a rank's part of it, and read its weights."""
    spec = read_spec(directory)
    options = TensorOptions(CPU, dtype, many_rows=not spec.generates)
    factory = LayerFactory(options, spec.quantization, mesh, collectives)
    model = build_model(spec, factory)
    is_gguf = bool(find_gguf_files(directory))
    checkpoint: Checkpoint = GgufCheckpoint(directory) if is_gguf else _named(directory, spec)
    check_weights(checkpoint, weight_specs_of(factory.layers), spec.architecture)
    load_all_weights(factory.layers, checkpoint, 2, ReadingProgress(1, SystemClock(), False))
    return Loaded(spec, model, mesh or Mesh(), dtype)


def states_of_rows(loaded: Loaded, rows: list[Tensor], types: Tensor | None = None) -> list[Tensor]:
    """[length, hidden] of each row [length], all rows of tokens in one step; `types` has those of all tokens."""
    spec, counts = rank_share(loaded.spec, loaded.mesh), np.array([len(row) for row in rows])
    blocks, groups = -(-int(counts.max()) // 16), len(spec.kv_groups())
    cache = allocate_kv_cache(spec, len(rows) * blocks * groups, 16, loaded.dtype, CPU)
    backend = beside_states(CpuAttention(kv_view(cache, spec)), spec, len(rows), loaded.dtype)
    set_rows(backend, counts.tolist())
    of_token = np.repeat(np.arange(len(rows)), counts)
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    tables = 1 + torch.arange(groups * len(rows) * blocks).view(groups, len(rows), blocks)
    tables *= torch.tensor(spec.block_entries)[:, None, None]
    backend.prepare(
        StepRows(
            counts=counts,
            row_of_token=of_token,
            bounds=np.zeros(len(rows), dtype=np.int64),
            slot_of_token=torch.from_numpy(of_token),
            starts=torch.zeros(len(rows), dtype=torch.int64),
            positions=positions,
            slots=torch.arange(len(rows)),
            device_counts=torch.from_numpy(counts),
            tables=tuple(tables.unbind()),
        )
    )
    hidden = loaded.model.hidden(torch.cat(rows), Positions(positions, types=types), backend)
    return list(hidden.split(counts.tolist()))


def _named(directory: Path, spec: ModelSpec) -> Checkpoint:
    modules = spec.family.modules
    return with_standard_names(
        SafetensorsCheckpoint(directory),
        tied=spec.tie_embeddings,
        left_out=spec.mtp_layers,
        expert=modules.expert,
        transposed_experts=modules.transposed_experts,
        others=modules.others,
        older=modules.older,
        unread=spec.unread,
        joined=modules.joined,
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
    checkpoint: Checkpoint = GgufCheckpoint(directory) if is_gguf else _named(directory, spec)
    check_weights(checkpoint, weight_specs_of(factory.layers), spec.architecture)
    load_all_weights(factory.layers, checkpoint, 2, ReadingProgress(1, SystemClock(), False))
    blocks, groups = -(-length // 16), len(spec.kv_groups())
    backend = beside_states(
        CpuAttention(kv_view(allocate_kv_cache(spec, blocks * groups, 16, dtype, CPU), spec)), spec, 1, dtype
    )
    set_rows(backend, [length])
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
            tables=tuple(
                (1 + g * blocks + torch.arange(blocks)).unsqueeze(0) * each for g, each in enumerate(spec.block_entries)
            ),
        )
    )
    lengths = positions.clamp(min=length) if spec.rope_length_mode else None
    return model.logits(model.hidden(tokens, Positions(positions, lengths), backend))
