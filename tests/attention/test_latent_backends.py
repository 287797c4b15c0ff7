"""Attention over latents by a GPU's backend, on whole steps, against the CPU's, which models are compared with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend, AttentionLayer, KVView, StepRows
from quire.compute.attention.cpu import CpuAttention
from quire.compute.attention.limits import PaddedLimits
from quire.compute.attention.triton_latents import TritonLatentAttention
from quire.compute.kernels.reference.attention_inputs import Mask, NormRopeForm, PagedKV, QKNormRope, Scores

HEADS, ROTATED, RANK, SIZE, BLOCKS = 20, 8, 24, 8, 30
LAYER = AttentionLayer(0, Scores(0.2))


def new_backend(sequences: int, device: str, *, triton: bool) -> tuple[AttentionBackend, Tensor]:
    """A backend, and its latents, which are NaN until they are written; block 0 is the dummy's."""
    latents = torch.full((1 + sequences * BLOCKS, SIZE, 1, ROTATED + RANK), float("nan"), device=device)
    latents[0] = 0
    view = KVView((PagedKV(latents, latents),), (0,), (Mask(),))
    if not triton:
        return CpuAttention(view), latents
    return TritonLatentAttention(view, ROTATED, HEADS, 6, 120, torch.float32), latents


def run(
    backend: AttentionBackend, lengths: dict[int, int], moves: dict[int, int], qk: Tensor, limits: PaddedLimits | None
) -> Tensor:
    """The results of a step that moves sequences forward by so many tokens; with limits, a row without tokens is
    last."""
    device, sequences = qk.device, [*moves, *([len(lengths)] if limits else [])]
    counts = np.array([*moves.values(), *([0] if limits else [])])
    starts = torch.tensor([lengths.get(sequence, 0) for sequence in sequences], device=device)
    rows = np.repeat(np.arange(len(sequences)), counts)
    slots, of_token = torch.tensor(sequences, device=device), torch.from_numpy(rows).to(device)
    offsets = torch.cat([torch.arange(count) for count in counts]).to(device)
    tables = 1 + torch.arange(len(lengths) * BLOCKS, device=device).view(-1, BLOCKS).flip(1)
    tables = torch.cat((tables, torch.zeros_like(tables[:1])))
    metadata = backend.build_metadata(counts, starts.cpu().numpy(), limits).copied(lambda each: each.to(device))
    backend.prepare(
        StepRows(
            counts, rows, starts.cpu().numpy(), slots[of_token], starts, starts[of_token] + offsets, slots,
            torch.from_numpy(counts).to(device), (tables,), metadata,
        )
    )  # fmt: skip
    angles = (starts[of_token] + offsets)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01], device=device)
    norm_rope = QKNormRope(cos=angles.cos(), sin=angles.sin(), form=NormRopeForm(interleaved=True))
    out = torch.full((len(rows), HEADS, ROTATED + RANK), float("nan"), device=device)
    backend.run(LAYER, qk, norm_rope, out)
    return out[..., ROTATED:].cpu()


STEPS = ({2: 5}, {0: 1, 2: 1, 3: 30}, {3: 1, 1: 64, 2: 12, 0: 1}, {0: 1, 1: 1, 2: 1, 3: 1}, {1: 1, 0: 31}, {3: 9})


@pytest.mark.parametrize("padded", [False, True])
def test_steps_of_all_kinds(padded: bool, device: str) -> None:
    """Rows of one token and of many at once, beside what was cached before."""
    generator, lengths = torch.Generator().manual_seed(0), dict.fromkeys(range(4), 0)
    (ours, _), (cpu, _) = new_backend(4, device, triton=True), new_backend(4, "cpu", triton=False)
    for moves in STEPS:
        qk = torch.randn((sum(moves.values()), HEADS + 1, ROTATED + RANK), generator=generator)
        limits = PaddedLimits(tokens=100, rows=len(moves) + 1, decode_rows=len(moves)) if padded else None
        found = run(ours, lengths, moves, qk.to(device), limits)
        torch.testing.assert_close(found, run(cpu, lengths, moves, qk, None), rtol=1e-5, atol=1e-5)
        for sequence, count in moves.items():
            lengths[sequence] += count
