"""Puts Quire's fused kernels in the place of transformers' modules that compute the same, as trying both shows.

Norms and gated MLPs are many small operations in transformers. A module is replaced only if its outputs are the
kernel's on random inputs of several magnitudes; nothing goes by names of classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from quire.compute.kernels.dispatch import kernel
from quire.models.fallback.products import Part, Product

_TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Differences that are rounding, as shares of the largest output."""
_MAGNITUDES = (1e-3, 1.0, 30.0)
_EPSILONS = ("variance_epsilon", "eps")
_SEED = 31


def fuse(model: nn.Module, dtype: torch.dtype) -> int:
    """Replace what can be replaced in a loaded model on a CPU. Returns the number of modules."""
    number = 0
    for module in model.modules():
        takes = list(inspect.signature(module.forward).parameters.values())
        if len(takes) != 1 or takes[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            continue
        for width, candidate in (*_norms(module, dtype), *_gated_mlps(module)):
            if _are_equal(module, candidate, width, dtype):
                module.__dict__["forward"] = candidate
                number += 1
                break
    return number


def _norms(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
    """Yield root mean square norms that the module may be: with its weight as it is, or stored minus one."""
    parameters = list(module.named_parameters())
    eps = next((getattr(module, name) for name in _EPSILONS if isinstance(getattr(module, name, None), float)), None)
    if eps is None or [name for name, _ in parameters] != ["weight"] or parameters[0][1].dim() != 1:
        return
    weight = parameters[0][1].detach()
    if weight.dtype == dtype:
        yield len(weight), _Norm(weight, eps)
    yield len(weight), _Norm(weight.float() + 1, eps)


def _gated_mlps(module: nn.Module) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
    """Yield down(silu(gate(x)) · up(x)) if the module has three products that fit."""
    linears = [child for child in module.children() if isinstance(child, nn.Linear)]
    others = [child for child in module.children() if not isinstance(child, nn.Linear)]
    if len(linears) != 3 or any(True for other in others for _ in other.parameters()):
        return
    parts = [child.__dict__.get("forward") for child in linears]
    both = [part for part in parts if isinstance(part, Part)]
    down = [part for part in parts if isinstance(part, Product)]
    widths = {child.out_features for child, part in zip(linears, parts, strict=True) if isinstance(part, Part)}
    if len(both) == 2 and len(down) == 1 and both[0].product is both[1].product and len(widths) == 1:
        yield linears[0].in_features, _GatedMlp(both[0].product, down[0], widths.pop())


def _are_equal(module: nn.Module, candidate: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(_SEED)
    for magnitude in _MAGNITUDES:
        x = (torch.randn((1, 5, width), generator=generator) * magnitude).to(dtype)
        try:
            expected, found = module(x.clone()), candidate(x.clone())
        except Exception:  # it takes other inputs
            return False
        if not isinstance(expected, Tensor) or expected.dtype != dtype or expected.shape != found.shape:
            return False
        if not (expected - found).abs().max() <= _TOLERANCES[dtype] * expected.abs().max():
            return False
    return True


class _Norm:
    """A root mean square norm by a kernel."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._rms_norm = kernel("rms_norm", "cpu")

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[-1] != len(self._weight):
            raise RuntimeError(f"a norm of {len(self._weight)} elements got {x.shape[-1]}")
        x = x.contiguous()
        out = torch.empty_like(x)
        self._rms_norm(x, self._weight, self._eps, out)
        return out


class _GatedMlp:
    """down(silu(gate(x)) · up(x)) by two kernels."""

    def __init__(self, both: Product, down: Product, width: int) -> None:
        self._both = both
        self._down = down
        self._width = width

    def __call__(self, x: Tensor) -> Tensor:
        inner = self._both.silu_and_mul(x.reshape(-1, x.shape[-1]), self._width)
        return self._down(inner).view(*x.shape[:-1], -1)
