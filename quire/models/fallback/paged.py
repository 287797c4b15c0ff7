"""The tier in which transformers' modules attend through Quire's attention, over Quire's KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from quire.compute.attention.backend import AttentionBackend, AttentionLayer
from quire.compute.kernels.reference.attention_inputs import QKNormRope, Scores
from quire.models.fallback.classes import set_attention
from quire.models.fallback.description import Description

PAGED = "quire"
"""The attention function's name. There is no mask function of this name, so models make no masks."""
_ATTRIBUTE = "quire_paged_attention"
_PLAIN = QKNormRope()


class PagedAttention:
    """What all attention modules of a model call, in the order of a forward."""

    def __init__(self, model: PreTrainedModel, description: Description) -> None:
        self._layers = [
            AttentionLayer(number, Scores(call.scale, call.cap)) for number, call in enumerate(description.calls)
        ]
        self._kv_heads, self._width = description.kv_heads, description.head_dim
        self._backend: AttentionBackend | None = None
        self._next = 0
        AttentionInterface.register(PAGED, _attend)
        for module in model.modules():
            module.__dict__[_ATTRIBUTE] = self
        set_attention(model, PAGED)

    def begin(self, backend: AttentionBackend) -> None:
        """Begin a forward, whose rows the backend has been prepared for."""
        self._backend, self._next = backend, 0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend: query [1, heads, tokens, width], key, value [1, KV heads, tokens, …] → [1, tokens, heads, …]."""
        assert self._backend is not None, "no step has begun"
        _, heads, tokens, _ = query.shape
        width, given = self._width, value.shape[-1]
        if (more := self._kv_heads // key.shape[1]) > 1:
            key, value = key.repeat_interleave(more, 1), value.repeat_interleave(more, 1)
        parts: tuple[Tensor, ...] = (query, key, value)
        if query.shape[-1] != width or given != width:
            parts = tuple(functional.pad(part, (0, width - part.shape[-1])) for part in parts)
        qkv = torch.cat(parts, 1)[0].transpose(0, 1).contiguous()
        out = qkv.new_empty((1, tokens, heads, width))
        self._backend.run(self._layers[self._next], qkv, _PLAIN, out[0])
        self._next += 1
        return out if given == width else out[..., :given]


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """Attention as transformers' modules call it: the sequences of a step lie behind one another in a batch of one."""
    attention: PagedAttention = module.__dict__[_ATTRIBUTE]
    return attention(query, key, value), None
