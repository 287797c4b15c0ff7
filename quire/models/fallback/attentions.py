"""Puts one product, Quire's rotation and paged attention in the place of whole attention modules of transformers.

Whether a module computes just that is seen by trying both on what a forward gives it; nothing goes by names of classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.compute.attention.backend import AttentionLayer, StepRows
from quire.compute.attention.limits import PaddedLimits
from quire.compute.attention.metadata import AttentionMetadata, IntArray
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.attention_inputs import CacheWrite, NormRopeForm, PagedKV, QKNormRope
from quire.models.fallback.fusions import TOLERANCES, Norm
from quire.models.fallback.paged import PagedAttention
from quire.models.fallback.products import Part, Product

_FORMS = (NormRopeForm(), NormRopeForm(interleaved=True), NormRopeForm(norm_last=True))


class FusedAttention:
    """An attention module whose queries, keys and values are one product.

    Args:
        original: The module's own forward, which computes references.
        paged: The model's attention.
        layer: The number of its call in a forward.
        parts: Its products and norms.
        form: How queries and keys are normed and rotated.
        others: How many values its output has behind the first one; all of them are None.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        paged: PagedAttention,
        layer: AttentionLayer,
        parts: _Parts,
        form: NormRopeForm,
        others: int | None,
    ) -> None:
        self._original = original
        self._paged = paged
        self._layer = layer
        self._inward, self._outward = parts.inward, parts.outward
        self._heads, self._width = paged.heads, paged.width
        self._plain = QKNormRope(norm=parts.norm, eps=parts.eps, form=form)
        self._nones = None if others is None else (None,) * others

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **rest: Any
    ) -> Any:
        """Attend as the module does: [1, tokens, hidden] → [1, tokens, hidden], and None for the rest of its output."""
        backend = self._paged.fused
        if backend is None or position_embeddings is None:
            return self._original(hidden_states, position_embeddings=position_embeddings, **rest)
        plain = self._plain
        cos, sin = self._paged.angles(position_embeddings, plain.form.interleaved)
        qkv = self._inward.rows(hidden_states[0])
        tokens, width = qkv.shape[0], self._width
        out = qkv.new_empty((tokens, self._heads, width))
        self._paged.skip(self._layer)
        backend.run(self._layer, qkv.view(tokens, -1, width), plain._replace(cos=cos, sin=sin), out)
        result = self._outward.rows(out.view(tokens, -1))[None]
        return result if self._nones is None else (result, *self._nones)


class _Parts(NamedTuple):
    inward: Product
    outward: Product
    norm: Tensor | None
    eps: float


class _Call(NamedTuple):
    """One call of a module: its arguments and output, and what it gave to attention."""

    hidden: Tensor
    given: dict[str, Any]
    output: Any
    attended: list[tuple[AttentionLayer, Tensor]]


class _Watch:
    """An AttentionBackend that notes queries, keys and values as they are attended to, and answers anything."""

    def __init__(self, paged: PagedAttention) -> None:
        self._heads, self._kv_heads = paged.heads, paged.kv_heads
        self._process = kernel("qk_norm_rope_and_cache", "cpu")
        self.attended: list[tuple[AttentionLayer, Tensor]] = []

    def build_metadata(
        self, counts: IntArray, bounds: IntArray, limits: PaddedLimits | None = None
    ) -> AttentionMetadata:
        return AttentionMetadata()

    def prepare(self, rows: StepRows) -> None:
        pass

    def run(self, layer: AttentionLayer, qkv: Tensor, norm_rope: QKNormRope, out: Tensor) -> None:
        q = torch.empty_like(out)
        keys, values = (qkv.new_empty((1, len(qkv), self._kv_heads, out.shape[-1])) for _ in range(2))
        slots = torch.arange(len(qkv))
        self._process(qkv, norm_rope, CacheWrite(PagedKV(keys, values), slots), q)
        self.attended.append((layer, torch.cat((q, keys[0], values[0]), 1)))
        generator = torch.Generator().manual_seed(layer.number)
        out.copy_(torch.randn(out.shape, generator=generator))


def fuse_attentions(model: nn.Module, paged: PagedAttention, dtype: torch.dtype, run: Callable[[], object]) -> int:
    """Replace what can be replaced in a loaded model on a CPU. Returns the number of modules.

    Args:
        model: The model, whose products and norms have been replaced.
        paged: The model's attention.
        dtype: The dtype of the model.
        run: Computes a forward of a few tokens at positions that differ much.
    """
    found = {module: parts for module in model.modules() if (parts := _parts_of(module, paged))}
    watch, number = _Watch(paged), 0
    calls = _watched(found, watch, paged, run)
    for module, parts in found.items():
        for form in _FORMS:
            fused = None if len(calls[module]) != 1 else _fused(module, parts, form, calls[module][0], paged)
            if fused is not None and _is_equal(fused, calls[module][0], watch, paged, dtype):
                module.__dict__["forward"] = fused
                number += 1
                break
    paged.begin(None)
    return number


def _parts_of(module: nn.Module, paged: PagedAttention) -> _Parts | None:
    """Return a module's parts if it has one product into all heads, one out of them, and at most norms beside."""
    forwards = [child.__dict__.get("forward") for child in module.children() if any(True for _ in child.parameters())]
    stacked = {id(each.product): each.product for each in forwards if isinstance(each, Part)}
    products = [*stacked.values(), *(each for each in forwards if isinstance(each, Product))]
    norms = [each for each in forwards if isinstance(each, Norm)]
    wide = (paged.heads + 2 * paged.kv_heads) * paged.width
    inward = [each for each in products if each.shape[0] == wide]
    outward = [each for each in products if each.shape[1] == paged.heads * paged.width and each not in inward]
    if len(inward) != 1 or len(outward) != 1 or len(products) != 2 or None in forwards:
        return None
    if not norms:
        return _Parts(inward[0], outward[0], None, 0.0)
    if len(norms) != 2 or norms[0].eps != norms[1].eps or any(norm.weight.shape != (paged.width,) for norm in norms):
        return None
    weight = torch.cat(
        [norm.weight.expand(heads, -1) for norm, heads in zip(norms, (paged.heads, paged.kv_heads), strict=True)]
    )
    return _Parts(inward[0], outward[0], weight, norms[0].eps)


def _watched(
    modules: dict[nn.Module, _Parts], watch: _Watch, paged: PagedAttention, run: Callable[[], object]
) -> dict[nn.Module, list[_Call]]:
    """Return the calls of these modules in a forward; none if it fails, or if their arguments have other names."""
    calls: dict[nn.Module, list[_Call]] = {module: [] for module in modules}

    def watched(module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def call(*args: Any, **given: Any) -> Any:
            before = len(watch.attended)
            output = forward(*args, **given)
            rest = dict(given)
            hidden = args[0] if args else rest.pop("hidden_states", None)
            if len(args) <= 1 and isinstance(hidden, Tensor) and isinstance(rest.get("position_embeddings"), tuple):
                calls[module].append(_Call(hidden, rest, output, watch.attended[before:]))
            return output

        return call

    for module in modules:
        module.__dict__["forward"] = watched(module)
    paged.begin(watch)
    try:
        with torch.inference_mode():
            run()
    except Exception:  # of whatever it does with such positions
        return {module: [] for module in modules}
    finally:
        for module in modules:
            del module.__dict__["forward"]
    return calls


def _fused(
    module: nn.Module, parts: _Parts, form: NormRopeForm, call: _Call, paged: PagedAttention
) -> FusedAttention | None:
    if len(call.attended) != 1 or (form.norm_last and parts.norm is None):
        return None
    outputs = call.output if isinstance(call.output, tuple) else None
    if outputs is not None and any(each is not None for each in outputs[1:]):
        return None
    others = None if outputs is None else len(outputs) - 1
    return FusedAttention(module.forward, paged, call.attended[0][0], parts, form, others)


def _is_equal(fused: FusedAttention, call: _Call, watch: _Watch, paged: PagedAttention, dtype: torch.dtype) -> bool:
    """Whether this module gives the same to attention, and makes the same of its answer."""
    paged.begin(watch)
    watch.attended.clear()
    try:
        with torch.inference_mode():
            output = fused(call.hidden, **call.given)
    except Exception:  # of what does not fit
        return False
    expected = call.output[0] if isinstance(call.output, tuple) else call.output
    found = output[0] if isinstance(output, tuple) else output
    pairs: Iterator[tuple[Tensor, Tensor]] = zip(
        (call.attended[0][1], expected), (watch.attended[0][1], found), strict=True
    )
    return all(
        own.shape == other.shape and bool((own - other).abs().max() <= TOLERANCES[dtype] * own.abs().max())
        for own, other in pairs
    )
