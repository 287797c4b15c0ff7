"""The blocks of decoders: where the norms of the residual stream stand, relative to attention and MLP.

A block takes the stream in two parts, x and what is still to be added to it, so that adding and norming take one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.collectives.delta import Delta, added, sum_of, total_of
from quire.models.layers.factory import LayerFactory
from quire.models.layers.rotary import Angles
from quire.models.projections import build_attention, build_mlp, norm_names
from quire.models.spec import ModelSpec


class Block(Protocol):
    """One layer of a decoder."""

    def __call__(self, x: Tensor, delta: Delta | None, angles: Angles | None, attention: AttentionBackend) -> Delta:
        """Add `delta` to x [tokens, hidden] in place, and return the next delta, which is not added yet."""
        ...


class PreNormBlock:
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int) -> None:
        kind, (before_attention, before_mlp) = spec.layers[layer].norms, norm_names(spec, layer)
        self._attention = build_attention(spec, build, layer)
        self._attention_norm = build.stream_norm(before_attention, spec.hidden, kind, self._attention.row_form)
        self._mlp = build_mlp(spec, build, layer)
        self._mlp_norm = build.stream_norm(before_mlp, spec.hidden, kind, self._mlp.row_form)

    def __call__(self, x: Tensor, delta: Delta | None, angles: Angles | None, attention: AttentionBackend) -> Delta:
        delta = self._attention(self._attention_norm.rows(x, delta), angles, attention)
        return self._mlp(self._mlp_norm.rows(x, delta))


class PostNormBlock:
    """x += norm(attention(x)); x += norm(mlp(x)), as in OLMo 2 (OLMo et al. 2024, section 3.2)."""

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int) -> None:
        kind, (after_attention, after_mlp) = spec.layers[layer].norms, norm_names(spec, layer)
        self._attention = build_attention(spec, build, layer)
        self._attention_norm = build.stream_norm(after_attention, spec.hidden, kind)
        self._mlp = build_mlp(spec, build, layer)
        self._mlp_norm = build.stream_norm(after_mlp, spec.hidden, kind)

    def __call__(self, x: Tensor, delta: Delta | None, angles: Angles | None, attention: AttentionBackend) -> Delta:
        if delta is not None:
            added(x, total_of(delta))
        added(x, self._attention_norm(self._attention(x, angles, attention)))
        return self._mlp_norm(self._mlp(x))


class SandwichBlock:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x))), as in Gemma 2 (Gemma Team 2024, section 2)."""

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int) -> None:
        kind, names = spec.layers[layer].norms, norm_names(spec, layer)
        self._attention = build_attention(spec, build, layer)
        self._before_attention = build.stream_norm(names[0], spec.hidden, kind, self._attention.row_form)
        self._after_attention = build.stream_norm(names[1], spec.hidden, kind)
        self._mlp = build_mlp(spec, build, layer)
        self._before_mlp = build.stream_norm(names[2], spec.hidden, kind, self._mlp.row_form)
        self._after_mlp = build.stream_norm(names[3], spec.hidden, kind)

    def __call__(self, x: Tensor, delta: Delta | None, angles: Angles | None, attention: AttentionBackend) -> Delta:
        delta = self._after_attention(self._attention(self._before_attention.rows(x, delta), angles, attention))
        return self._after_mlp(self._mlp(self._before_mlp.rows(x, delta)))


class ParallelBlock:
    """x += attention(norm(x)) + mlp(norm(x)), with one norm or two (Wang & Komatsuzaki 2021, GPT-J)."""

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int) -> None:
        kind, names = spec.layers[layer].norms, norm_names(spec, layer)
        self._attention = build_attention(spec, build, layer)
        self._mlp = build_mlp(spec, build, layer)
        form = self._attention.row_form if kind.number == 2 or self._attention.row_form == self._mlp.row_form else None
        self._norm = build.stream_norm(names[0], spec.hidden, kind, form)
        self._mlp_norm = None
        if kind.number == 2:
            self._mlp_norm = build.stream_norm(names[1], spec.hidden, kind, self._mlp.row_form)

    def __call__(self, x: Tensor, delta: Delta | None, angles: Angles | None, attention: AttentionBackend) -> Delta:
        rows = self._norm.rows(x, delta)
        mlp_rows = rows if self._mlp_norm is None else self._mlp_norm.rows(x, None)
        return sum_of(self._attention(rows, angles, attention), self._mlp(mlp_rows))


_BLOCKS: dict[str, Callable[[ModelSpec, LayerFactory, int], Block]] = {
    "before": PreNormBlock,
    "behind": PostNormBlock,
    "around": SandwichBlock,
    "parallel": ParallelBlock,
}


def build_block(spec: ModelSpec, build: LayerFactory, layer: int) -> Block:
    """Build layer number `layer`."""
    return _BLOCKS[spec.layers[layer].norms.place](spec, build, layer)
