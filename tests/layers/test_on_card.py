"""Layers on a card give what they give on the processor: same weights, same input, fp32 and bf16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.routing import Routing
from quire.models.layer_spec import MixtureSpec
from quire.models.layers.factory import LayerFactory
from quire.models.layers.mixture import MixtureNames
from quire.models.weights.checkpoint import StoredTensor
from quire.models.weights.tensor_options import TensorOptions

HIDDEN, WIDTH = 256, 384
Apply = Callable[[Tensor], Tensor]


class Drawn:
    """A checkpoint drawn on the processor, so that every device reads the same numbers."""

    def contents(self) -> dict[str, StoredTensor]:
        return {}

    def read(self, name: str, out: Tensor, start: object = None) -> None:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        out.copy_(torch.randn(out.shape, generator=generator) / out.shape[-1] ** 0.5)

    def close(self) -> None:
        pass


def mlp(factory: LayerFactory) -> Apply:
    gate_up = factory.column_parallel(("gate", "up"), (WIDTH, WIDTH), HIDDEN, True)
    return factory.gated_mlp(gate_up, factory.row_parallel("down", HIDDEN, WIDTH, False), WIDTH, "silu")


def experts(factory: LayerFactory) -> Apply:
    return factory.experts(MixtureSpec(HIDDEN, WIDTH, 8, Routing(3, True)), MixtureNames("moe.gate", "moe.experts"))


def tied_head(factory: LayerFactory) -> Apply:
    return factory.head("head", factory.embedding("embed", 1000, HIDDEN), 1000, HIDDEN)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [mlp, experts, tied_head])
@pytest.mark.parametrize("tokens", [1, 3, 16, 40, 128, 300])
@torch.inference_mode()
def test_layers_agree(build: Callable[[LayerFactory], Apply], tokens: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    found = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        factory = LayerFactory(TensorOptions(torch.device(device), kind))
        layer = build(factory)
        for part in factory.layers:
            part.load_weights(Drawn())
        found.append(layer(x.to(device, kind)).double().cpu())
    expected, on_card = found
    near = 1e-5 if dtype == torch.float32 else 3e-2
    # A bf16 router may send a token elsewhere where two logits are nearly equal, hence tokens and not their maximum.
    error = (on_card - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.median() < near
    assert (error < near).float().mean() > 0.9
