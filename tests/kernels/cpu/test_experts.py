"""Experts and their router equal their references: odd widths, experts without tokens, broken logits."""

from __future__ import annotations

import math

import pytest
import torch

from quire.compute.kernels.activations import SILU, Activation
from quire.compute.kernels.cpu.embedding import local_indices
from quire.compute.kernels.cpu.experts import add_gated, experts, pack_experts, route
from quire.compute.kernels.reference import experts as reference
from quire.compute.kernels.reference.experts import ExpertBiases
from quire.compute.kernels.routing import Routing
from tests.kernels.routings import SCORED, scored

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.usefixtures("instructions")


def normal(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("tokens", "count", "chosen"), [(1, 8, 2), (5, 1, 1), (33, 128, 8), (0, 8, 2), (3, 6, 6)])
def test_route(dtype: torch.dtype, renormalise: bool, tokens: int, count: int, chosen: int) -> None:
    shuffled = torch.rand(tokens, count, generator=torch.Generator().manual_seed(0)).argsort(-1)
    logits = (shuffled / 16).to(dtype)  # no two of a token are equal, in bf16 either
    weights, numbers = route(logits, Routing(chosen, renormalise))
    expected, by_torch = reference.route(logits, Routing(chosen, renormalise))
    assert torch.equal(numbers, by_torch)
    assert weights.dtype == dtype
    torch.testing.assert_close(weights, expected, rtol=TOLERANCE[dtype], atol=1e-6)


def test_of_equal_experts_the_first_are_chosen(instructions: str) -> None:
    if instructions == "none":
        pytest.skip("torch chooses others")
    assert route(torch.zeros(2, 9), Routing(3, True))[1].tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rules", SCORED)
@pytest.mark.parametrize("tokens", [1, 90])
def test_route_by_other_scores(dtype: torch.dtype, rules: str, tokens: int) -> None:
    routing, logits, correction = scored(rules, tokens)
    weights, numbers = route(logits.to(dtype), routing, correction=correction)
    expected, by_torch = reference.route(logits.to(dtype), routing, correction=correction)
    assert torch.equal(numbers, by_torch)
    torch.testing.assert_close(weights, expected, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("rules", SCORED)
def test_broken_logits_choose_other_experts_by_any_score(rules: str) -> None:
    routing, logits, correction = scored(rules, 3)
    sound = route(logits.clone(), routing, correction=correction)[0]
    logits[1] = float("nan")
    weights, numbers = route(logits, routing, correction=correction)
    assert weights[1].isnan().all()
    assert all(len(set(row)) == routing.chosen and set(row) <= set(range(12)) for row in numbers.tolist())
    assert torch.equal(weights[::2], sound[::2])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("tokens", "width", "factor"), [(1, 7, 1.0), (9, 128, 0.5), (700, 130, 1.0)])
def test_add_gated(dtype: torch.dtype, gated: bool, tokens: int, width: int, factor: float) -> None:
    out, y = normal(tokens, width, seed=0, dtype=dtype), normal(tokens, width, seed=1, dtype=dtype)
    gate = normal(tokens, 1, seed=2, dtype=dtype) if gated else None
    expected = factor * (out.double() + (1 if gate is None else gate.double().sigmoid()) * y.double())
    add_gated(out, y, gate, factor)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_broken_logits_choose_experts_that_there_are_and_break_the_token_alone(broken: float) -> None:
    logits = normal(3, 8, seed=0, dtype=torch.float32)
    sound, _ = route(logits, Routing(4, True))
    logits[1, 3] = broken
    weights, numbers = route(logits, Routing(4, True))
    assert weights[1].isnan().any()
    assert sorted(set(numbers[1].tolist())) == sorted(numbers[1].tolist())
    assert set(numbers[1].tolist()) <= set(range(8))
    assert torch.equal(weights[::2], sound[::2])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("tokens", "count", "chosen", "hidden", "width"),
    [(1, 4, 2, 64, 64), (7, 5, 3, 50, 33), (40, 8, 2, 96, 128), (130, 3, 1, 31, 65), (0, 4, 2, 16, 16)],
)
def test_experts(dtype: torch.dtype, tokens: int, count: int, chosen: int, hidden: int, width: int) -> None:
    x = normal(tokens, hidden, seed=0, dtype=dtype)
    gate_up = normal(count, 2 * width, hidden, seed=1, dtype=dtype) / hidden**0.5
    down = normal(count, hidden, width, seed=2, dtype=dtype) / width**0.5
    weights, numbers = reference.route(normal(tokens, count - 1, seed=3, dtype=dtype), Routing(chosen))
    found, expected = torch.empty_like(x), torch.empty(tokens, hidden, dtype=torch.float32)
    exact = (x.float(), gate_up.float().unbind(), down.float().unbind(), numbers, weights.float(), expected)
    reference.experts(*exact)
    experts(x, pack_experts(gate_up), pack_experts(down), numbers, weights, found)
    torch.testing.assert_close(found.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "activation",
    [SILU, Activation(limit=0.7), Activation("swigluoai", 1.702, 0.8), Activation("gelu"), Activation("relu2")],
    ids=str,
)
@pytest.mark.parametrize("width", [64, 33])
@pytest.mark.parametrize("has_down", [True, False])
def test_biases_and_activations(dtype: torch.dtype, activation: Activation, width: int, has_down: bool) -> None:
    """Each expert's outputs in fp64: limits bite, and biases are as large as products."""
    tokens, count, chosen, hidden = 21, 4, 2, 48
    x = normal(tokens, hidden, seed=0, dtype=dtype)
    rows = activation.products * width
    gate_up = normal(count, rows, hidden, seed=1, dtype=dtype) / hidden**0.5
    down = normal(count, hidden, width, seed=2, dtype=dtype) / width**0.5
    of_gate_up, of_down = normal(count, rows, seed=4, dtype=dtype), normal(count, hidden, seed=5, dtype=dtype)
    weights, numbers = reference.route(normal(tokens, count, seed=3, dtype=dtype), Routing(chosen))
    found, again, expected = torch.empty_like(x), torch.empty_like(x), torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for weight, number in zip(weights[token].double(), numbers[token], strict=True):
            both = gate_up[number].double() @ x[token].double() + of_gate_up[number].double()
            gate, up = both.chunk(2) if activation.products == 2 else (both, both.relu())
            limit = activation.limit or math.inf
            up = up.clamp(-limit, limit) + (activation.kind == "swigluoai")
            gated = (gate * torch.sigmoid(gate)).clamp(max=limit)
            if activation.kind == "swigluoai":
                gate = gate.clamp(max=limit)
                gated = gate * torch.sigmoid(activation.alpha * gate)
            if activation.kind == "gelu":
                gated = torch.nn.functional.gelu(gate, approximate="tanh")
            if activation.kind == "relu2":
                gated = up
            y = down[number].double() @ (gated * up)
            expected[token] += weight * (y + has_down * of_down[number].double())
    terms = {"activation": activation, "biases": ExpertBiases(of_gate_up, of_down if has_down else None)}
    experts(x, pack_experts(gate_up), pack_experts(down), numbers, weights, found, **terms)
    reference.experts(x, gate_up.unbind(), down.unbind(), numbers, weights, again, **terms)
    within = TOLERANCE[dtype] * (2 if activation.kind == "relu2" else 1)  # a square doubles what an up is off by
    for own in (found, again):
        torch.testing.assert_close(own.double(), expected, rtol=within, atol=within)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_experts_of_ranks_add_up_to_all(dtype: torch.dtype) -> None:
    """Each has some; tokens without one of them get zeros, also where a rank has none of anybody's."""
    tokens, count, chosen, hidden, width = 33, 7, 2, 48, 64
    x = normal(tokens, hidden, seed=0, dtype=dtype)
    gate_up = normal(count, 2 * width, hidden, seed=1, dtype=dtype) / hidden**0.5
    down = normal(count, hidden, width, seed=2, dtype=dtype) / width**0.5
    weights, numbers = reference.route(normal(tokens, count - 2, seed=3, dtype=dtype), Routing(chosen))
    whole, total = torch.empty_like(x), torch.zeros(tokens, hidden)
    experts(x, pack_experts(gate_up), pack_experts(down), numbers, weights, whole)
    for first, end in ((0, 3), (3, 5), (5, 7)):
        own, part = torch.empty_like(numbers), torch.full_like(x, float("nan"))
        local_indices(numbers.view(-1), first, end - first, own.view(-1))
        experts(x, pack_experts(gate_up[first:end]), pack_experts(down[first:end]), own, weights, part)
        without = ~((numbers >= first) & (numbers < end)).any(1)
        assert without.any()
        assert not part[without].any()
        total += part.float()
    torch.testing.assert_close(total, whole.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
