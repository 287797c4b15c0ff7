"""Products of experts whose weights are codes, of every scheme, against fp64 of what the codes stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quire.compute.kernels.reference import coded_experts as reference
from quire.compute.kernels.reference.coded_experts import Coded, one_of, stack_weights
from quire.compute.kernels.triton.experts.coded_experts import coded_experts, coded_experts_with_config
from quire.compute.kernels.triton.linear.coded_gemm import CodedConfig, coded_gemm, coded_linear
from tests.kernels.triton.experts.test_experts import close, exact, mixture
from tests.kernels.triton.linear.coded_weights import CODED, gate_and_up

EXPERTS, CHOSEN, HIDDEN, WIDTH = 3, 2, 128, 128
CONFIGS = [CodedConfig(16, 32, 128, 4, 3), CodedConfig(32, 64, 64, 4, 3)]


def layer(make: Callable[..., Coded], device: str) -> tuple[Coded, Coded]:
    gate_up = stack_weights(EXPERTS, lambda number: make(2 * WIDTH, HIDDEN, number, device))
    return gate_up, stack_weights(EXPERTS, lambda number: make(HIDDEN, WIDTH, 10 + number, device))


def dense(stack: Coded) -> torch.Tensor:
    return torch.stack([one_of(stack, number).dense() for number in range(EXPERTS)]).double()


@pytest.mark.parametrize(
    ("tokens", "scheme"), [*((1, scheme) for scheme in CODED), (17, "nf4, groups of 64"), (17, "fp8, blocks")]
)
def test_products(tokens: int, scheme: str, device: str) -> None:
    x, _, _, numbers, weights = mixture(tokens, EXPERTS, CHOSEN, HIDDEN, WIDTH, torch.bfloat16, device)
    gate_up, down = layer(CODED[scheme], device)
    expected = exact(x, dense(gate_up), dense(down), numbers, weights)
    found = torch.full_like(x, float("nan"))
    config = CONFIGS[tokens > 1]
    coded_experts_with_config(x, gate_up, down, numbers, weights, found, config, overlap=False)
    close(found, expected)
    reference.coded_experts(x, gate_up, down, numbers, weights, found.fill_(float("nan")))
    close(found, expected)


def test_products_of_some_of_the_experts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In codes and on the host alike; other memory has no part in it."""
    empty, dtype = torch.empty, torch.bfloat16
    monkeypatch.setattr(
        torch, "empty", lambda *size, **kind: empty(*size, **kind).fill_(float("nan") if kind["dtype"] == dtype else 99)
    )
    others = 4
    x, _, _, numbers, weights = mixture(17, EXPERTS + others, CHOSEN, HIDDEN, WIDTH, dtype, device)
    numbers[0] = EXPERTS + 1
    gate_up, down = layer(CODED["nf4, groups of 64"], device)
    here, own = numbers < EXPERTS, numbers.clamp(max=EXPERTS)
    expected = exact(x, dense(gate_up), dense(down), numbers.where(here, 0), weights.where(here, 0))
    found = torch.full_like(x, float("nan"))
    coded_experts(x, gate_up, down, own, weights, found, others)
    close(found, expected)
    reference.coded_experts(x, gate_up, down, own, weights, found.fill_(float("nan")), others)
    close(found, expected)
    assert not found[0].any()


def test_op(device: str) -> None:
    gate_up, down = layer(CODED["nf4, groups of 64"], device)
    for tokens in (0, 1, 40):
        x, _, _, numbers, weights = mixture(tokens, EXPERTS, CHOSEN, HIDDEN, WIDTH, torch.float32, device)
        found = torch.full_like(x, float("nan"))
        coded_experts(x, gate_up, down, numbers, weights, found)
        if tokens:
            close(found, exact(x, dense(gate_up), dense(down), numbers, weights))


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("scheme", CODED)
def test_a_dense_layer(scheme: str, gate: bool, device: str) -> None:
    """Rows and outputs that fill no tile, and rows of x that lie apart."""
    outputs, columns = 72, 128
    weight = CODED[scheme](outputs, columns, 3, device)
    x = torch.randn(5, columns + 16, device=device).bfloat16()[:, :columns]
    bias = torch.randn(outputs, device=device).bfloat16()
    y = torch.full((5, outputs // 2 if gate else outputs), float("nan"), device=device).bfloat16()
    coded_gemm(x, weight, bias, y, CodedConfig(16, 32, 64, 4, 3), gate, overlap=False)
    whole = x.double() @ weight.dense().double().T + bias.double()
    close(y, gate_and_up(whole) if gate else whole)


@pytest.mark.parametrize("rows", [0, 1, 16, 19])
def test_every_number_of_rows(rows: int, device: str) -> None:
    weight, dtype = CODED["4 bits, groups of 32"](64, 64, 3, device), torch.float16 if rows == 16 else torch.bfloat16
    x = torch.randn(rows, 64, device=device).to(dtype)
    y = torch.full((rows, 64), float("nan"), device=device, dtype=dtype)
    coded_linear(x, weight, None, y, False)
    if rows:
        close(y, x.double() @ weight.dense().double().T)
