"""Attention within images: patches see the patches of their own image or window, and nothing is cached."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.attention.backend import AttentionLayer, StepRows
from quire.compute.attention.limits import PaddedLimits
from quire.compute.attention.metadata import AttentionMetadata, IntArray
from quire.compute.kernels.reference.attention_inputs import QKNormRope

Segments = Sequence[Tensor]
"""Patches that see one another: for each length, [segments, length] int64, indices of patches."""


class ImageAttention:
    """An AttentionBackend for a tower.

    Args:
        segments: Those of each layer.
    """

    def __init__(self, segments: Sequence[Segments]) -> None:
        self._segments = segments

    def build_metadata(
        self, counts: IntArray, bounds: IntArray, limits: PaddedLimits | None = None
    ) -> AttentionMetadata:
        return AttentionMetadata()

    def prepare(self, rows: StepRows) -> None:
        """Do nothing: segments say all."""

    def run(self, layer: AttentionLayer, qkv: Tensor, norm_rope: QKNormRope, out: Tensor) -> None:
        """Rotate queries and keys, in fp32, and attend: qkv [patches, 3 · heads, d] → out [patches, heads, d]."""
        q, k, v = qkv.view(len(out), 3, *out.shape[1:]).unbind(1)
        if norm_rope.cos is not None and norm_rope.sin is not None:
            q, k = (_rotated(x, norm_rope.cos, norm_rope.sin) for x in (q, k))
        for places in self._segments[layer.number]:
            queries, keys, values = (x[places].transpose(1, 2) for x in (q, k, v))  # [segments, heads, length, d]
            attended = F.scaled_dot_product_attention(queries, keys, values, scale=layer.scores.scale)
            out[places] = attended.transpose(1, 2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1).float(), sin.unsqueeze(1).float()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
