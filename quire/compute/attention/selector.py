"""Chooses the backend that computes attention on a device."""

from __future__ import annotations

import torch

from quire.compute.attention.backend import AttentionBackend, KVView


def attention_backend(
    kv: KVView,
    heads: int,
    max_rows: int,
    step_tokens: int,
    max_length: int,
    dtype: torch.dtype,
    has_slopes: bool = False,
) -> AttentionBackend:
    """Return the attention backend of the device that the KV cache lies on. Arguments are those of TritonAttention."""
    if kv.layers[0].keys.device.type == "cpu":
        from quire.compute.attention.cpu import CpuAttention

        return CpuAttention(kv)
    from quire.compute.attention.triton import TritonAttention  # Triton is there only with a GPU's torch

    return TritonAttention(kv, heads, max_rows, step_tokens, max_length, dtype, has_slopes)
