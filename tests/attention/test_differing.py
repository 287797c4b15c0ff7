"""Layers whose heads differ: each shape has a backend of its own, and all share a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.compute.attention.backend import AttentionBackend, AttentionLayer, KVView, StepRows
from quire.compute.attention.cpu import CpuAttention
from quire.compute.attention.differing import DifferingAttention
from quire.compute.attention.metadata import AttentionMetadata
from quire.compute.kernels.reference.attention_inputs import Mask, PagedKV, QKNormRope, Scores

HEADS, SHAPES = (4, 6, 4), ((2, 16), (1, 32), (2, 16))  # query heads, and KV heads and width, of each layer
BLOCK, LENGTH = 8, 29


def view(device: str) -> KVView:
    layers = tuple(PagedKV(*torch.zeros((2, 12, BLOCK, *shape), device=device).unbind()) for shape in SHAPES)
    return KVView(layers, (0, 1, 2), (Mask(window=5), Mask(), Mask()))


def outputs(backend: AttentionBackend, device: str) -> list[torch.Tensor]:
    """Of a prompt in two chunks and a token behind it, for each layer."""
    found, generator = [], torch.Generator().manual_seed(0)
    tables = tuple((torch.arange(4, device=device) + 4 * group)[None] for group in range(3))
    for begin, end in ((0, 17), (17, LENGTH - 1), (LENGTH - 1, LENGTH)):
        n = end - begin
        counts, bounds = np.array([n]), np.array([begin])
        zeros = torch.zeros(n, dtype=torch.int64, device=device)
        metadata = AttentionMetadata() if n == 1 else backend.build_metadata(counts, bounds)
        rows = StepRows(
            counts, np.zeros(n, dtype=np.int64), bounds, zeros, torch.tensor([begin], device=device),
            torch.arange(begin, end, device=device), zeros[:1], torch.tensor([n], device=device), tables,
            metadata.copied(lambda column: torch.as_tensor(column).to(device)),
        )  # fmt: skip
        backend.prepare(rows)
        for number, (heads, (kv_heads, d)) in enumerate(zip(HEADS, SHAPES, strict=True)):
            qkv = torch.randn((n, heads + 2 * kv_heads, d), generator=generator).to(device)
            out = torch.empty((n, heads, d), device=device)
            backend.run(AttentionLayer(number, Scores(d**-0.5)), qkv, QKNormRope(), out)
            found.append(out.cpu())
    return found


@pytest.mark.parametrize("kind", ["cpu", "triton"])
def test_layers_of_several_shapes(kind: str, device: str) -> None:
    expected = outputs(CpuAttention(view("cpu")), "cpu")
    if kind == "cpu":
        differing = DifferingAttention(view("cpu"), HEADS, lambda kv, heads: CpuAttention(kv))
        found = outputs(differing, "cpu")
    else:
        from quire.compute.attention.triton import TritonAttention

        found = outputs(
            DifferingAttention(view(device), HEADS, lambda kv, heads: TritonAttention(kv, heads, 4, 64, 64)), device
        )
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
