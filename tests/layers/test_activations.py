"""The op of each activation that config.json may name, against transformers' function of this name."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.dispatch import kernel
from quire.models.layers.mlp import GATED, PLAIN

X = 2.5 * torch.randn(7, 66, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", PLAIN)
def test_without_a_gate(name: str) -> None:
    from transformers.activations import ACT2FN

    out = torch.empty_like(X)
    kernel(PLAIN[name], "cpu")(X, out)
    torch.testing.assert_close(out, ACT2FN[name](X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", GATED)
def test_with_a_gate(name: str) -> None:
    from transformers.activations import ACT2FN

    out = torch.empty(7, 33)
    kernel(GATED[name], "cpu")(X, out)
    torch.testing.assert_close(out, ACT2FN[name](X[:, :33]) * X[:, 33:], rtol=1e-5, atol=1e-5)
