"""The modules of sentence-transformers that make an embedding of a pooled vector: Dense, LayerNorm and Normalize."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from quire.models.sentence_files import DenseModule, NormModule, VectorModule
from quire.models.weights.checkpoint import WeightSpec, check_weights
from quire.models.weights.safetensors import SafetensorsCheckpoint

_NORM_EPS = 1e-5
"""Epsilon of torch's LayerNorm."""
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}


class VectorModules:
    """Modules with their weights in float32, in which they are computed.

    Args:
        modules: In order.
        directory: The model's directory, with a folder for each module; None: weights are zeros.

    Raises:
        CheckpointError: The weights of a module are missing, or have other shapes.
    """

    def __init__(self, modules: Sequence[VectorModule], directory: Path | None, device: torch.device) -> None:
        self._modules = [_built(module, directory, device) for module in modules]

    def __call__(self, x: Tensor) -> Tensor:
        """Compute embeddings: pooled vectors [texts, inputs] fp32 → [texts, dim] fp32."""
        for module in self._modules:
            x = module(x)
        return x


def normalized(x: Tensor) -> Tensor:
    """Return x [n, width] divided by the length of each row, which counts as at least 1e-12."""
    return functional.normalize(x, p=2.0, dim=-1)


def _built(module: VectorModule, directory: Path | None, device: torch.device) -> Callable[[Tensor], Tensor]:
    if isinstance(module, DenseModule):
        return _dense(module, directory, device)
    if isinstance(module, NormModule):
        specs = [WeightSpec(f"norm.{name}", (module.width,)) for name in ("weight", "bias")]
        weight, bias = _weights(module.folder, specs, directory, device)
        return lambda x: functional.layer_norm(x, (module.width,), weight, bias, _NORM_EPS)
    return normalized


def _dense(module: DenseModule, directory: Path | None, device: torch.device) -> Callable[[Tensor], Tensor]:
    shape, projects = (module.outputs, module.inputs), module.residual and module.inputs != module.outputs
    specs = [WeightSpec("linear.weight", shape)]
    specs += [WeightSpec("linear.bias", shape[:1])] if module.bias else []
    specs += [WeightSpec("residual.weight", shape)] if projects else []
    weights = iter(_weights(module.folder, specs, directory, device))
    weight = next(weights)
    bias = next(weights) if module.bias else None
    residual = next(weights) if projects else None
    activate = _ACTIVATIONS.get(module.activation)

    def dense(x: Tensor) -> Tensor:
        y = functional.linear(x, weight, bias)
        if activate is not None:
            y = activate(y)
        if module.residual:
            y = y + (x if residual is None else functional.linear(x, residual))
        return y

    return dense


def _weights(folder: str, specs: Iterable[WeightSpec], directory: Path | None, device: torch.device) -> list[Tensor]:
    specs = list(specs)
    found = [torch.zeros(spec.shape, dtype=torch.float32, device=device) for spec in specs]
    if directory is None:
        return found
    checkpoint = SafetensorsCheckpoint(directory / folder)
    try:
        check_weights(checkpoint, specs, f"the module {folder}")
        for spec, tensor in zip(specs, found, strict=True):
            checkpoint.read(spec.name, tensor)
    finally:
        checkpoint.close()
    return found
