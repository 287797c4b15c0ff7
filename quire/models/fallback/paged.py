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
    """What all attention modules of a model call, in the order of a forward.

    Attributes:
        heads, kv_heads, width: The numbers of heads of a layer, and their width in the cache.
        backend: Computes the forward; None: no forward has begun.
        fuses: Whether whole modules may be computed at once.
        fused: The backend of a forward that computes whole modules at once; None: transformers computes them.
    """

    def __init__(self, model: PreTrainedModel, description: Description) -> None:
        self._layers = [
            AttentionLayer(number, Scores(call.scale, call.cap)) for number, call in enumerate(description.calls)
        ]
        self.heads, self.kv_heads = description.calls[0].heads, description.kv_heads
        self.width = description.head_dim
        self.backend: AttentionBackend | None = None
        self.fuses = True
        self.fused: AttentionBackend | None = None
        self._next = 0
        self._angles: dict[tuple[int, bool], tuple[Any, Tensor, Tensor]] = {}
        AttentionInterface.register(PAGED, _attend)
        for module in model.modules():
            module.__dict__[_ATTRIBUTE] = self
        set_attention(model, PAGED)

    def begin(self, backend: AttentionBackend | None) -> None:
        """Begin a forward, whose rows the backend has been prepared for; None: end all."""
        self.backend, self._next = backend, 0
        self.fused = backend if self.fuses else None
        self._angles.clear()

    def skip(self, layer: AttentionLayer) -> None:
        """Note that this layer is computed elsewhere."""
        self._next = layer.number + 1

    def angles(self, pair: tuple[Tensor, Tensor], interleaved: bool) -> tuple[Tensor, Tensor]:
        """Return cosines and sines as kernels take them: those of transformers have each angle twice.

        Args:
            pair: Cosines and sines [1, tokens, width], the same object for all layers that share them.
            interleaved: Whether the two stand side by side, instead of in two halves.
        """
        known = self._angles.get((id(pair), interleaved))
        if known is None:
            halves = [each[0, :, ::2] if interleaved else each[0, :, : each.shape[-1] // 2] for each in pair]
            known = self._angles[id(pair), interleaved] = (pair, halves[0].contiguous(), halves[1].contiguous())
        return known[1:]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend: query [1, heads, tokens, width], key, value [1, KV heads, tokens, …] → [1, tokens, heads, …]."""
        assert self.backend is not None, "no step has begun"
        _, heads, tokens, _ = query.shape
        width, given = self.width, value.shape[-1]
        if (more := self.kv_heads // key.shape[1]) > 1:
            key, value = key.repeat_interleave(more, 1), value.repeat_interleave(more, 1)
        parts: tuple[Tensor, ...] = (query, key, value)
        if query.shape[-1] != width or given != width:
            parts = tuple(functional.pad(part, (0, width - part.shape[-1])) for part in parts)
        qkv = torch.cat(parts, 1)[0].transpose(0, 1).contiguous()
        out = qkv.new_empty((1, tokens, heads, width))
        self.backend.run(self._layers[self._next], qkv, _PLAIN, out[0])
        self._next += 1
        return out if given == width else out[..., :given]


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """Attention as transformers' modules call it: the sequences of a step lie behind one another in a batch of one."""
    attention: PagedAttention = module.__dict__[_ATTRIBUTE]
    return attention(query, key, value), None
