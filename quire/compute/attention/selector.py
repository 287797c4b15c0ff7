"""Chooses the backend that computes attention on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.compute.attention.backend import AttentionBackend, KVView
from quire.compute.attention.differing import DifferingAttention, shapes_of


def attention_backend(
    kv: KVView,
    heads: Sequence[int],
    max_rows: int,
    step_tokens: int,
    max_length: int,
    dtype: torch.dtype,
    has_slopes: bool = False,
) -> AttentionBackend:
    """Return the attention backend of the device that the KV cache lies on. `heads` has the number of query heads of
    each layer; other arguments are those of TritonAttention.
    """
    if kv.layers[0].keys.device.type == "cpu":
        from quire.compute.attention.cpu import CpuAttention

        return CpuAttention(kv)
    from quire.compute.attention.triton import TritonAttention  # Triton is there only with a GPU's torch

    def build(own: KVView, of_own: int) -> AttentionBackend:
        return TritonAttention(own, of_own, max_rows, step_tokens, max_length, dtype, has_slopes)

    return build(kv, heads[0]) if len(set(shapes_of(kv, heads))) == 1 else DifferingAttention(kv, heads, build)


def latent_attention_backend(
    kv: KVView, rotated: int, heads: int, max_rows: int, step_tokens: int, dtype: torch.dtype
) -> AttentionBackend:
    """Return the attention backend of the device that a cache of latents lies on. Arguments are those of
    TritonLatentAttention.
    """
    if kv.layers[0].keys.device.type == "cpu":
        from quire.compute.attention.cpu import CpuAttention

        return CpuAttention(kv)
    from quire.compute.attention.triton_latents import TritonLatentAttention  # Triton is there only with a GPU's torch

    return TritonLatentAttention(kv, rotated, heads, max_rows, step_tokens, dtype)
