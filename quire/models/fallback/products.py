"""Lets Quire's kernels compute the products of transformers' modules on a CPU, where they read weights much faster."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.compute.kernels.cpu.bound import bound_linear, bound_silu_and_mul
from quire.compute.kernels.cpu.large_pages import LargePages
from quire.compute.kernels.cpu.linear import PackedWeight, packed_shape
from quire.compute.kernels.dispatch import kernel

Products = list[list[nn.Linear]]
"""Linear layers in groups that read the same input, one after another."""


class _Watched(nn.Linear):
    """A linear layer on the meta device that notes its inputs, and who else takes its weight."""

    def forward(self, input: Tensor) -> Tensor:
        self.__dict__["quire_inputs"].append(input)
        return input.new_empty((*input.shape[:-1], self.out_features))

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            self.__dict__["quire_inputs"].append(None)
        return super().__getattr__(name)


def find_products(model: PreTrainedModel, run: Callable[[], object]) -> Products:
    """Return the linear layers that each forward calls once, and whose weights nothing else takes.

    Args:
        model: A model on the meta device.
        run: Computes all of it.

    Returns:
        Layers of one module that read the same input lie in one group. There are none if `run` fails without values,
        since nothing is known then.
    """
    tied = model.all_tied_weights_keys or {}
    kept = {*tied, *tied.values()}
    names = {
        module: name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and f"{name}.weight" not in kept
    }
    for layer in names:
        layer.__dict__["quire_inputs"] = []
        layer.__class__ = _Watched
    try:
        run()
    except Exception:  # of whatever it does with values
        return []
    finally:
        for layer in names:
            layer.__class__ = nn.Linear
        inputs = {layer: layer.__dict__.pop("quire_inputs") for layer in names}
    once = [layer for layer in names if len(inputs[layer]) == 1 and inputs[layer][0] is not None]

    def alike(layer: nn.Linear) -> tuple[str, int, bool]:
        return names[layer].rpartition(".")[0], id(inputs[layer][0]), layer.bias is None

    return [list(group) for _, group in groupby(once, alike)]


def use_kernels(products: Products, dtype: torch.dtype) -> None:
    """Pack the weights of these layers for Quire's `linear`, and drop them in the layout that torch has."""
    pack = kernel("pack_linear", "cpu")
    pages = LargePages(sum(_packed_bytes(layers, dtype.itemsize) for layers in products))
    for layers in products:
        if any(parameter.dtype != dtype for layer in layers for parameter in layer.parameters()):
            continue  # the model keeps some in fp32
        weight = torch.cat([layer.weight.detach() for layer in layers])
        bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
        for layer in layers:
            layer.weight = nn.Parameter(torch.empty_like(layer.weight, device="meta"), requires_grad=False)
        product = Product(pages.moved(pack(weight)), bias, (weight.shape[0], weight.shape[1]))
        end = 0
        for layer in layers:
            begin, end = end, end + layer.out_features
            layer.__dict__["forward"] = product if len(layers) == 1 else Part(product, begin, end)


def _packed_bytes(layers: list[nn.Linear], element: int) -> int:
    shape = packed_shape(sum(layer.out_features for layer in layers), layers[0].in_features, element)
    return prod(shape) * element


class Product:
    """x Wᵀ + b by a kernel: [..., columns] → [..., rows]. W may stack several layers, which ask for their `part`.

    Attributes:
        shape: (rows, columns) of W.
        rows: Multiplies rows: [n, columns] → [n, rows of W].
        silu_and_mul: Returns silu of the first half of the product times the second: [n, columns] → [n, rows of W / 2].
    """

    def __init__(self, packed: Tensor | PackedWeight, bias: Tensor | None, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.rows = bound_linear(packed, bias)
        self.silu_and_mul = bound_silu_and_mul(packed, bias, shape[0] // 2)
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, input: Tensor) -> Tensor:
        return self.rows(input.reshape(-1, self.shape[1])).view(*input.shape[:-1], -1)

    def part(self, input: Tensor, begin: int, end: int) -> Tensor:
        """Return some rows of the product. The first ones are asked for first, and the last ones last."""
        last = self._last
        whole = self(input) if begin == 0 or last is None or last[0] is not input else last[1]
        self._last = None if end == whole.shape[-1] else (input, whole)
        return whole[..., begin:end].contiguous()


class Part:
    """The rows `begin` to `end` - 1 of a product.

    Attributes:
        product: The whole product.
    """

    def __init__(self, product: Product, begin: int, end: int) -> None:
        self.product = product
        self._begin = begin
        self._end = end

    def __call__(self, input: Tensor) -> Tensor:
        return self.product.part(input, self._begin, self._end)
