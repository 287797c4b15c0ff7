"""Puts Quire's fused kernels in the place of transformers' modules that compute the same, as trying both shows.

Norms and gated MLPs are many small operations in transformers. A module is replaced only if its outputs are the
kernel's on random inputs of several magnitudes; nothing goes by names of classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from quire.compute.kernels.cpu.bound import bound_rms_norm
from quire.models.fallback.products import Part, Product

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
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
        yield len(weight), Norm(weight, eps, dtype)
    yield len(weight), Norm(weight.float() + 1, eps, dtype)


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
    if (
        len(both) == 2
        and len(down) == 1
        and both[0].product is both[1].product
        and len(widths) == 1
        and both[0].product.shape[0] == 2 * widths.pop()
    ):
        yield linears[0].in_features, _GatedMlp(both[0].product, down[0])


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
        if not (expected - found).abs().max() <= TOLERANCES[dtype] * expected.abs().max():
            return False
    return True


class Norm:
    """A root mean square norm by a kernel.

    Attributes:
        weight: [width], in the model's dtype or fp32.
        eps: Added to the mean square.
    """

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        self.weight = weight
        self.eps = eps
        self._norm = bound_rms_norm(weight, eps, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x)


class _GatedMlp:
    """down(silu(gate(x)) · up(x)) by two kernels."""

    def __init__(self, both: Product, down: Product) -> None:
        self._columns = both.shape[1]
        self._inner = both.silu_and_mul
        self._down = down.rows

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._inner(x.reshape(-1, self._columns))).view(*x.shape[:-1], -1)
