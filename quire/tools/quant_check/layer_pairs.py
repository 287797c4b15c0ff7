"""Two models whose layers form pairs: each layer of the base model with the same layer of the quantized model.

The base model runs over the pairs, so one layer can be computed by both on the same activations, or taken from the
quantized model alone. The quantized model runs as it is served. Weights are either all read at the start, or layer by
layer when they are needed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from quire.foundation.clock import Clock
from quire.models.layers.embedding import Embedding
from quire.models.layers.factory import LayerFactory
from quire.models.layers.layer import Layer, weight_specs_of
from quire.models.layers.linear import Linear
from quire.models.layers.norm import LayerNorm, RMSNorm
from quire.models.layers.qk_norm import QKNorm
from quire.models.model import Model, build_model
from quire.models.weights.checkpoint import Checkpoint
from quire.models.weights.tensor_options import TensorOptions
from quire.planning.auto_config import ResolvedConfig
from quire.runtime.worker.kv_tensors import DENSE
from quire.runtime.worker.weight_loading import load_weights, open_checkpoint

SMALLEST_NORM = 1e-12
Kind = Literal["product", "norm", "embedding"]
Mode = Literal["base", "compare", "quantized"]


class LayerPair:
    """Stands in for a layer of the base model, with all of its methods.

    Args:
        base, quantized: What computes the layer in each model.

    Attributes:
        modules: The checkpoint's modules whose weights the layer stacks.
        mode: Who computes: the base model's layer (`base`); both layers, and the error is added up (`compare`); the
            quantized model's layer (`quantized`).
    """

    def __init__(self, layer: Layer, base: Layer | OnDemandLayer, quantized: Layer | OnDemandLayer) -> None:
        self.base: Any = base
        self.quantized: Any = quantized
        self.mode: Mode = "base"
        self._layer = layer
        self.modules, self._rows = _modules(layer)
        self._sums: Tensor | None = None
        self._tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.quantized if self.mode == "quantized" else self.base, name)

    @property
    def name(self) -> str:
        """`model.layers.0.self_attn.q_proj/k_proj/v_proj`."""
        return "/".join([self.modules[0], *(module.rpartition(".")[2] for module in self.modules[1:])])

    @property
    def kind(self) -> Kind:
        if isinstance(self._layer, RMSNorm | LayerNorm | QKNorm):
            return "norm"
        return "embedding" if isinstance(self._layer, Embedding) else "product"

    def __call__(self, x: Tensor, *others: Any) -> Tensor:
        if self.mode == "quantized":
            return self.quantized(x, *others)  # type: ignore[no-any-return]
        y: Tensor = self.base(x, *others)
        if self.mode == "compare":  # a norm has added its delta to x by now
            self._add(y, self.quantized(x) if self.kind == "norm" else self.quantized(x, *others))
        return y

    def pending(self, x: Tensor) -> Tensor:
        """The layer's output, as a call returns it: no adapters add to it."""
        return self(x)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """[tokens, columns] → [tokens, half of the rows]: silu of the first half of the outputs, times the second."""
        if self.mode == "quantized":
            return self.quantized.silu_and_mul(x)  # type: ignore[no-any-return]
        y: Tensor = self.base.silu_and_mul(x)
        if self.mode == "compare":
            self._add(y, self.quantized.silu_and_mul(x))
        return y

    def errors(self) -> dict[str, float]:
        """By module, |difference| / |base model's output|, averaged over the compared tokens.

        Modules whose outputs are only used together have one error under all of their names. The norms of queries and
        keys, which are part of attention, have the error of their weights.
        """
        if self._sums is not None:
            means = (self._sums / self._tokens).tolist()
        elif isinstance(weight := getattr(self.base, "weight", None), Tensor):
            means = [float(_relative(self.quantized.weight.flatten(), weight.flatten()))]
        else:
            return {}
        return dict(zip(self.modules if len(means) > 1 else (self.name,), means, strict=True))

    def _add(self, y: Tensor, other: Tensor) -> None:
        """Add up the error of the quantized layer's `other` against the base layer's y, both [tokens, outputs]."""
        y, other = y.flatten(1), other.flatten(1)
        rows = list(self._rows) if sum(self._rows) == y.shape[1] else [y.shape[1]]
        parts = zip(torch.split(other, rows, 1), torch.split(y, rows, 1), strict=True)
        sums = torch.stack([_relative(theirs, ours).sum() for theirs, ours in parts])
        self._sums = sums if self._sums is None else self._sums + sums
        self._tokens += len(y)


@dataclass(frozen=True)
class PairedModels:
    """Both models, with weights. The base model runs over the pairs, which are in the order in which the layers were
    built; the quantized model runs as it is served."""

    base: Model
    quantized: Model
    pairs: tuple[LayerPair, ...]


@contextmanager
def paired_models(
    base: ResolvedConfig, quantized: ResolvedConfig, clock: Clock, *, at_once: bool
) -> Iterator[PairedModels]:
    """Build both models, of one shape, dtype and device, which can compute within this context. `at_once` tells whether
    all weights are read now. Raises CheckpointError if a model's files cannot be used, and MemoryBudgetError if the
    weights do not fit."""
    device = torch.device("cuda:0" if base.config.device.device == "cuda" else "cpu")
    options = TensorOptions(device, DENSE[base.config.model.dtype])
    ours, theirs = OnDemandWeights(), OnDemandWeights()
    others: list[Layer | OnDemandLayer] = []
    pairs: list[LayerPair] = []
    in_pairs: set[Layer] = set()

    def other(layer: Layer) -> Layer | OnDemandLayer:
        in_pairs.add(layer)
        others.append(layer if at_once else OnDemandLayer(layer, theirs))
        return others[-1]

    def paired(layer: Layer) -> LayerPair:
        in_pairs.add(layer)
        pairs.append(LayerPair(layer, layer if at_once else OnDemandLayer(layer, ours), others[len(pairs)]))
        return pairs[-1]

    other_factory = LayerFactory(options, quantized.spec.quantization, stand_in=other)
    other_model = build_model(quantized.spec, other_factory)
    factory = LayerFactory(options, base.spec.quantization, stand_in=paired)
    model = build_model(base.spec, factory)
    with ExitStack() as stack:
        for resolved, built, weights in ((base, factory, ours), (quantized, other_factory, theirs)):
            if at_once:
                load_weights(resolved.config, resolved.spec, resolved.spec, built, clock)
            else:
                weights.checkpoint = open_checkpoint(resolved.config, resolved.spec, weight_specs_of(built.layers))
                stack.callback(weights.checkpoint.close)
                for layer in built.layers:
                    if layer not in in_pairs:  # sinks of attention and corrections of routers, which are small
                        layer.load_weights(weights.checkpoint)
        yield PairedModels(model, other_model, tuple(pairs))


def _relative(other: Tensor, y: Tensor) -> Tensor:
    """|other - y| / |y| over the last dimension, in fp32."""
    difference = torch.linalg.vector_norm((other.float() - y.float()), dim=-1)
    relative: Tensor = difference / torch.linalg.vector_norm(y.float(), dim=-1).clamp_min(SMALLEST_NORM)
    return relative


def _modules(layer: Layer) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """A layer's modules, and the outputs of each, if the layer is a product of several with weights as they are."""
    specs = list(layer.weight_specs())
    modules = tuple(dict.fromkeys(spec.name.rpartition(".")[0] for spec in specs))
    if not isinstance(layer, Linear):
        return _shortened(modules), ()
    shapes = [spec.shape for spec in specs if spec.name.endswith(".weight") and len(spec.shape) == 2]
    by_row = tuple(shape[0] for shape in shapes)
    whole = len(shapes) == len(modules) and sum(by_row) == layer.outputs
    return modules, by_row if whole else (layer.outputs,)


def _shortened(modules: tuple[str, ...]) -> tuple[str, ...]:
    """A layer's modules, with all experts as one, however many there are."""
    first, _, _ = modules[0].partition(".experts.")
    return modules if len(modules) == 1 or first == modules[0] else (f"{first}.experts",)


class OnDemandWeights:
    """The weights of a model, of which one layer has its own at a time.

    `checkpoint` has the weights while the model computes; it is None while the model is still being built.
    """

    def __init__(self) -> None:
        self.checkpoint: Checkpoint | None = None
        self._owner: Layer | None = None
        self._ready: Any = None

    def of(self, layer: Layer) -> Any:
        """A copy of the layer, with its weights."""
        assert self.checkpoint is not None, "computes before it can read"
        if self._owner is not layer:
            self._owner = self._ready = None  # frees the memory of the layer before
            ready = copy.deepcopy(layer)
            ready.load_weights(self.checkpoint)
            self._owner, self._ready = layer, ready
        return self._ready


class OnDemandLayer:
    """Stands in for a layer that never has weights itself, with all of its methods."""

    def __init__(self, layer: Layer, weights: OnDemandWeights) -> None:
        self._layer = layer
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer if self._weights.checkpoint is None else self._weights.of(self._layer), name)

    def __call__(self, *x: Tensor) -> Tensor:
        y: Tensor = self._weights.of(self._layer)(*x)
        return y

    def pending(self, x: Tensor) -> Tensor:
        """The layer's output, as a call returns it. Models take this method before there are weights."""
        return self(x)
