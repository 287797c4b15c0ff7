"""The blocks of decoders and encoders: where the norms of the residual stream stand, relative to attention and MLP.

A block takes the stream in two parts, x and what is still to be added to it, so that adding and norming take one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from quire.compute.attention.backend import AttentionBackend
from quire.compute.collectives.delta import Delta, Stream, added, sum_of, total_of
from quire.models.layers.factory import LayerFactory
from quire.models.layers.norm import LayerNorm, NoNorm, RMSNorm, stream_behind
from quire.models.layers.rotary import Angles
from quire.models.projections import build_cross_attention, build_mixer, build_mlp, norm_names
from quire.models.recurrent_spec import NoMixerSpec
from quire.models.spec import ModelSpec


class Block(Protocol):
    """One layer of a decoder or an encoder."""

    def __call__(self, x: Tensor, delta: Delta | None, angles: Angles | None, attention: AttentionBackend) -> Stream:
        """Add `delta` to x [tokens, hidden] in place, and return the next stream, whose delta is not added yet."""
        ...


class PreNormBlock:
    """x += attention(norm(x)); x += mlp(norm(x)). If there is only one norm, attention reads x itself."""

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int) -> None:
        kind, (before_attention, before_mlp) = spec.layers[layer].norms, norm_names(spec, layer)
        self._attention = build_mixer(spec, build, layer)
        self._attention_norm: RMSNorm | LayerNorm | NoNorm = NoNorm()
        if kind.number == 2:
            self._attention_norm = build.stream_norm(before_attention, spec.hidden, kind, self._attention.row_form)
        self._mlp = build_mlp(spec, build, layer)
        self._mlp_norm = build.stream_norm(before_mlp, spec.hidden, kind, self._mlp.row_form)

    def __call__(self, x: Tensor, delta: Delta | None, angles: Angles | None, attention: AttentionBackend) -> Stream:
        rows = self._attention_norm.before(x, delta)
        delta = self._attention(rows, angles, attention)
        x = stream_behind(x, rows)
        rows = self._mlp_norm.before(x, delta)
        delta = self._mlp(rows)
        return Stream(stream_behind(x, rows), delta)


class CrossBlock:
    """x += attention(norm(x)); x += cross attention(norm(x)); x += mlp(norm(x)), as in decoders behind an encoder."""

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int) -> None:
        kind, (before_attention, before_cross, before_mlp) = spec.layers[layer].norms, norm_names(spec, layer)
        self._attention = build_mixer(spec, build, layer)
        self._attention_norm = build.stream_norm(before_attention, spec.hidden, kind, self._attention.row_form)
        self._cross = build_cross_attention(spec, build, layer)
        self._cross_norm = build.stream_norm(before_cross, spec.hidden, kind, self._cross.row_form)
        self._mlp = build_mlp(spec, build, layer)
        self._mlp_norm = build.stream_norm(before_mlp, spec.hidden, kind, self._mlp.row_form)

    def __call__(self, x: Tensor, delta: Delta | None, angles: Angles | None, attention: AttentionBackend) -> Stream:
        delta = self._attention(self._attention_norm.rows(x, delta), angles, attention)
        delta = self._cross(self._cross_norm.rows(x, delta), attention)
        return Stream(x, self._mlp(self._mlp_norm.rows(x, delta)))


class PostNormBlock:
    """x += norm(attention(x)); x += norm(mlp(x)), as in OLMo 2 (OLMo et al. 2024, section 3.2)."""

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int) -> None:
        kind, (after_attention, after_mlp) = spec.layers[layer].norms, norm_names(spec, layer)
        self._attention = build_mixer(spec, build, layer)
        self._attention_norm = build.stream_norm(after_attention, spec.hidden, kind)
        self._mlp = build_mlp(spec, build, layer)
        self._mlp_norm = build.stream_norm(after_mlp, spec.hidden, kind)

    def __call__(self, x: Tensor, delta: Delta | None, angles: Angles | None, attention: AttentionBackend) -> Stream:
        if delta is not None:
            added(x, total_of(delta))
        added(x, self._attention_norm(self._attention(x, angles, attention)))
        return Stream(x, self._mlp_norm(self._mlp(x)))


class SandwichBlock:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x))), as in Gemma 2 (Gemma Team 2024, section 2)."""

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int) -> None:
        kind, names = spec.layers[layer].norms, norm_names(spec, layer)
        self._attention = build_mixer(spec, build, layer)
        self._before_attention = build.stream_norm(names[0], spec.hidden, kind, self._attention.row_form)
        self._after_attention = build.stream_norm(names[1], spec.hidden, kind)
        self._mlp = build_mlp(spec, build, layer)
        self._before_mlp = build.stream_norm(names[2], spec.hidden, kind, self._mlp.row_form)
        self._after_mlp = build.stream_norm(names[3], spec.hidden, kind)

    def __call__(self, x: Tensor, delta: Delta | None, angles: Angles | None, attention: AttentionBackend) -> Stream:
        delta = self._after_attention(self._attention(self._before_attention.rows(x, delta), angles, attention))
        return Stream(x, self._after_mlp(self._mlp(self._before_mlp.rows(x, delta))))


class ParallelBlock:
    """x += attention(norm(x)) + mlp(norm(x)), with one norm or two (Wang & Komatsuzaki 2021, GPT-J)."""

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int) -> None:
        kind, names = spec.layers[layer].norms, norm_names(spec, layer)
        self._attention = build_mixer(spec, build, layer)
        self._mlp = build_mlp(spec, build, layer)
        form = self._attention.row_form if kind.number == 2 or self._attention.row_form == self._mlp.row_form else None
        self._norm = build.stream_norm(names[0], spec.hidden, kind, form)
        self._mlp_norm = None
        if kind.number == 2:
            self._mlp_norm = build.stream_norm(names[1], spec.hidden, kind, self._mlp.row_form)

    def __call__(self, x: Tensor, delta: Delta | None, angles: Angles | None, attention: AttentionBackend) -> Stream:
        rows = self._norm.rows(x, delta)
        mlp_rows = rows if self._mlp_norm is None else self._mlp_norm.rows(x, None)
        return Stream(x, sum_of(self._attention(rows, angles, attention), self._mlp(mlp_rows)))


class SumNormBlock:
    """x = norm(x + attention(x)); x = norm(x + mlp(x)), as in BERT (Vaswani et al. 2017, section 3.1)."""

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int) -> None:
        kind, (of_attention, of_mlp) = spec.layers[layer].norms, norm_names(spec, layer)
        self._attention = build_mixer(spec, build, layer)
        self._attention_norm = build.stream_norm(of_attention, spec.hidden, kind)
        self._mlp = build_mlp(spec, build, layer)
        self._mlp_norm = build.stream_norm(of_mlp, spec.hidden, kind)

    def __call__(self, x: Tensor, delta: Delta | None, angles: Angles | None, attention: AttentionBackend) -> Stream:
        if delta is not None:
            added(x, total_of(delta))
        x = self._attention_norm(x, self._attention(x, angles, attention))
        return Stream(self._mlp_norm(x, self._mlp(x)), None)


class NormedStreamBlock:
    """x = norm(x); x = a x + attention(x); x = norm(x); x = b x + mlp(x), as in MiniMax-01 (MiniMax 2025)."""

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int) -> None:
        kind, (before_attention, before_mlp) = spec.layers[layer].norms, norm_names(spec, layer)
        self._kept = kind.kept
        self._attention = build_mixer(spec, build, layer)
        self._attention_norm = build.stream_norm(before_attention, spec.hidden, kind)
        self._mlp = build_mlp(spec, build, layer)
        self._mlp_norm = build.stream_norm(before_mlp, spec.hidden, kind)

    def __call__(self, x: Tensor, delta: Delta | None, angles: Angles | None, attention: AttentionBackend) -> Stream:
        normed = self._attention_norm(x, delta)
        x = normed * self._kept[0]
        normed = self._mlp_norm(x, self._attention(normed, angles, attention))
        return Stream(normed * self._kept[1], self._mlp(normed))


class OnePartBlock:
    """x += part(norm(x)), where the part is a mixer or an MLP, as in Mamba and Nemotron-H."""

    def __init__(self, spec: ModelSpec, build: LayerFactory, layer: int) -> None:
        own, (name, *_) = spec.layers[layer], norm_names(spec, layer)
        self._mixer = None if isinstance(own.mixer, NoMixerSpec) else build_mixer(spec, build, layer)
        part = self._mlp = build_mlp(spec, build, layer) if self._mixer is None else None
        form = self._mixer.row_form if self._mixer is not None else part.row_form if part is not None else None
        self._norm = build.stream_norm(name, spec.hidden, own.norms, form)

    def __call__(self, x: Tensor, delta: Delta | None, angles: Angles | None, attention: AttentionBackend) -> Stream:
        rows = self._norm.rows(x, delta)
        if self._mlp is not None:
            return Stream(x, self._mlp(rows))
        assert self._mixer is not None
        return Stream(x, self._mixer(rows, angles, attention))


_BLOCKS: dict[str, Callable[[ModelSpec, LayerFactory, int], Block]] = {
    "before": PreNormBlock,
    "behind": PostNormBlock,
    "around": SandwichBlock,
    "parallel": ParallelBlock,
    "on sums": SumNormBlock,
    "alone": OnePartBlock,
    "on normed": NormedStreamBlock,
    "before, with cross": CrossBlock,
}


def build_block(spec: ModelSpec, build: LayerFactory, layer: int) -> Block:
    """Build layer number `layer`."""
    return _BLOCKS[spec.layers[layer].norms.place](spec, build, layer)
