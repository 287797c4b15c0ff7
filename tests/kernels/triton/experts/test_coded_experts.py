"""Products of experts whose weights are codes, of every scheme, against fp64 of what the codes stand for, and of what
codes of activations stand for where these are quantized too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quire.compute.kernels.reference import experts as reference
from quire.compute.kernels.reference.experts import Coded, one_of, stack_weights
from quire.compute.kernels.reference.linear import ScaledWeight
from quire.compute.kernels.triton.experts import experts as module
from quire.compute.kernels.triton.experts.expert_gemms import ExpertConfigs
from quire.compute.kernels.triton.experts.experts import (
    coded_experts,
    experts_with_configs,
    measured_configs,
    scaled_configs,
)
from quire.compute.kernels.triton.experts.routing import group_and_quantize, group_by_expert
from quire.compute.kernels.triton.linear.coded_gemm import CodedConfig, coded_gemm, coded_linear
from quire.compute.kernels.triton.linear.gemm import GemmConfig
from quire.compute.kernels.triton.linear.gemv import GemvConfig
from quire.compute.kernels.triton.norm import quantize_rows as quantize_rows_alone
from tests.kernels.triton.experts.expected import close_in_codes, quantized
from tests.kernels.triton.experts.test_experts import TERMS, biases_of, close, exact, mixture
from tests.kernels.triton.linear.coded_weights import CODED, gate_and_up

EXPERTS, CHOSEN, HIDDEN, WIDTH = 3, 2, 128, 128
TABLE = measured_configs("8-bit")
CONFIGS = [GemmConfig(16, 32, 128, 1, 4, 3, True), GemmConfig(32, 64, 64, 1, 4, 3, True)]
EXPANDED = [scheme for scheme in CODED if "fp8" not in scheme and "int8" not in scheme]
SCALED = [scheme for scheme in CODED if scheme not in EXPANDED]
WAYS: tuple[ExpertConfigs, ...] = (
    (GemvConfig(16, 128, 2), GemvConfig(8, 128, 1)),
    (GemmConfig(16, 128, 64, 1, 4, 4, True), GemmConfig(16, 64, 32, 1, 4, 3, True)),
    (GemmConfig(32, 64, 128, 1, 4, 3, False), GemmConfig(32, 32, 32, 1, 4, 3, False)),
    (GemmConfig(128, 64, 64, 1, 4, 3, False), GemmConfig(128, 32, 32, 1, 4, 3, True)),
    (GemmConfig(16, 64, 64, 1, 4, 3, True), GemmConfig(16, 64, 64, 1, 4, 3, True)),
)


def layer(make: Callable[..., Coded], device: str) -> tuple[Coded, Coded]:
    gate_up = stack_weights(EXPERTS, lambda number: make(2 * WIDTH, HIDDEN, number, device))
    return gate_up, stack_weights(EXPERTS, lambda number: make(HIDDEN, WIDTH, 10 + number, device))


def dense(stack: Coded) -> torch.Tensor:
    count = len(stack.codes if isinstance(stack, ScaledWeight) else stack.packed)
    return torch.stack([one_of(stack, number).dense() for number in range(count)]).double()


@pytest.mark.parametrize(("tokens", "scheme"), [*((1, scheme) for scheme in EXPANDED), (17, "nf4, groups of 64")])
def test_products(tokens: int, scheme: str, device: str) -> None:
    x, _, _, numbers, weights = mixture(tokens, EXPERTS, CHOSEN, HIDDEN, WIDTH, torch.bfloat16, device)
    gate_up, down = layer(CODED[scheme], device)
    expected = exact(x, dense(gate_up), dense(down), numbers, weights)
    found = torch.full_like(x, float("nan"))
    configs = (CONFIGS[tokens > 1],) * 2
    experts_with_configs(x, gate_up, down, numbers, weights, found, configs, overlap=False)
    close(found, expected)
    reference.coded_experts(x, gate_up, down, numbers, weights, found.fill_(float("nan")))
    close(found, expected)


@pytest.mark.parametrize("scheme", [next(scheme for scheme in EXPANDED if "mxfp4" in scheme), SCALED[0]])
def test_biases_and_activations(scheme: str, device: str) -> None:
    x, _, _, numbers, weights = mixture(3, EXPERTS, CHOSEN, HIDDEN, WIDTH, torch.float32, device)
    gate_up, down = layer(CODED[scheme], device)
    terms = {"activation": TERMS[2], "biases": biases_of(EXPERTS, HIDDEN, WIDTH, x.dtype, device)}
    found, expected = (torch.full_like(x, float("nan")) for _ in range(2))
    coded_experts(x, gate_up, down, numbers, weights, found, **terms)
    reference.coded_experts(x, gate_up, down, numbers.long(), weights, expected, **terms)
    torch.testing.assert_close(found, expected, rtol=6e-2, atol=6e-2)


@pytest.mark.parametrize("configs", WAYS)
@pytest.mark.parametrize(("tokens", "scheme"), [*((1, scheme) for scheme in SCALED), (17, "fp8, channels")])
def test_products_of_codes_of_8_bits(tokens: int, scheme: str, configs: ExpertConfigs, device: str) -> None:
    x, _, _, numbers, weights = mixture(tokens, EXPERTS, CHOSEN, HIDDEN, WIDTH, torch.bfloat16, device)
    gate_up, down = layer(CODED[scheme], device)
    found = torch.full_like(x, float("nan"))
    experts_with_configs(x, gate_up, down, numbers, weights, found, configs, overlap=False)
    if isinstance(configs[0], GemvConfig):
        close(found, exact(x, dense(gate_up), dense(down), numbers, weights))
    else:
        assert isinstance(gate_up, ScaledWeight)
        assert isinstance(down, ScaledWeight)
        close_in_codes(found, quantized(x, gate_up, down, numbers, weights, configs))


@pytest.mark.parametrize("configs", WAYS)
@pytest.mark.parametrize("scheme", ["fp8, channels", "fp8, blocks"])
def test_sizes_that_fill_no_tile_and_experts_that_are_elsewhere(
    scheme: str, configs: ExpertConfigs, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else there is in memory."""
    empty, dtype, hidden, width = torch.empty, torch.bfloat16, 144, 160
    x, _, _, numbers, weights = mixture(5, EXPERTS + 2, CHOSEN, hidden, width, dtype, device)
    numbers[0] = EXPERTS
    gate_up = stack_weights(EXPERTS, lambda number: CODED[scheme](2 * width, hidden, number, device))
    down = stack_weights(EXPERTS, lambda number: CODED[scheme](hidden, width, 10 + number, device))
    assert isinstance(gate_up, ScaledWeight)
    assert isinstance(down, ScaledWeight)
    if scheme == "fp8, blocks":
        assert gate_up.scales.shape[1:] == (3, 2)
        assert down.scales.shape[1:] == (2, 2)
    own, here = numbers.clamp(max=EXPERTS), numbers < EXPERTS
    found = torch.full_like(x, float("nan"))
    with monkeypatch.context() as patch:
        patch.setattr(
            torch,
            "empty",
            lambda *size, **kind: empty(*size, **kind).fill_(77 if kind["dtype"] == torch.int32 else float("nan")),
        )
        experts_with_configs(x, gate_up, down, own, weights, found, configs, overlap=False, others=2)
    if isinstance(configs[0], GemvConfig):
        close(found, exact(x, dense(gate_up), dense(down), numbers.where(here, 0), weights.where(here, 0)))
    else:
        close_in_codes(found, quantized(x, gate_up, down, own, weights, configs))
    assert not found[0].any()


def test_rows_are_quantized_beside_grouping(device: str) -> None:
    """As by the kernel that does nothing else, and pairs are grouped as without."""
    numbers = torch.rand(9, 6).topk(3).indices.to(device, torch.int32)
    x = torch.randn(9, 200, device=device).bfloat16()
    for dtype in (torch.float8_e4m3fn, torch.int8):
        for group in (200, 16):
            order, tiles, (codes, scales) = group_and_quantize(numbers, 6, 16, x, dtype, group)
            expected_codes, expected_scales = quantize_rows_alone(x, dtype, group)
            assert torch.equal(codes.view(torch.int8), expected_codes.view(torch.int8))
            assert torch.equal(scales, expected_scales)
            expected_order, expected_tiles = group_by_expert(numbers, 6, 16)
            assert torch.equal(order, expected_order)
            assert torch.equal(tiles, expected_tiles)


MEMORY = 227 * 1024
"""Bytes of shared memory that a program may have."""


@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.int8])
def test_configs_of_8_bits_go_together(codes: torch.dtype, block: int | None) -> None:
    """They fit a card, and with blocks no step has more columns than one of them."""
    for measured, configs in TABLE.items():
        assert configs[-1][0] == float("inf")
        for most, own in configs:
            first, second = scaled_configs(measured, int(min(most, 100_000)), codes, block, MEMORY)
            if isinstance(first, GemvConfig):
                assert codes != torch.int8
                continue
            assert isinstance(second, GemmConfig)
            assert first.block_m == second.block_m
            assert (first.block_m + first.block_n) * first.block_k * (first.stages - 1) <= MEMORY
            if block is None:
                assert isinstance(own[0], GemvConfig) or (first, second) == own
            else:
                assert block % first.block_k == block % second.block_k == 0


@pytest.mark.parametrize("scheme", SCALED)
def test_only_blocks_of_scales_change_configs(scheme: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale for each output is none of them, although rows of the second weight are shorter than of the first."""
    given: list[tuple[GemmConfig, ...]] = []
    monkeypatch.setattr(module, "experts_with_configs", lambda *args, **kwargs: given.append(args[-1]))
    make = CODED[scheme]
    gate_up, down = (stack_weights(2, lambda n, s=shape: make(*s, n, device)) for shape in ((256, 512), (512, 128)))
    x = torch.empty(100, 512, device=device).bfloat16()
    coded_experts(x, gate_up, down, torch.zeros(100, 2, dtype=torch.int32), torch.ones(100, 2), torch.empty_like(x))
    assert ("blocks" in scheme) == (given[0][0].block_n == 128)


@pytest.mark.gpu
@pytest.mark.parametrize("others", [0, 5])
@pytest.mark.parametrize("scheme", SCALED)
@pytest.mark.parametrize("tokens", [1, 30, 70, 200, 600])
def test_every_choice_of_8_bits_on_a_card(tokens: int, scheme: str, others: int) -> None:
    of_all, chosen, hidden, width = 16, 4, 512, 256
    x, _, _, numbers, weights = mixture(tokens, of_all, chosen, hidden, width, torch.bfloat16, "cuda")
    make, count = CODED[scheme], of_all - others
    gate_up = stack_weights(count, lambda number: make(2 * width, hidden, number, "cuda"))
    down = stack_weights(count, lambda number: make(hidden, width, of_all + number, "cuda"))
    assert isinstance(gate_up, ScaledWeight)
    assert isinstance(down, ScaledWeight)
    block = 128 if "blocks" in scheme else None
    configs = scaled_configs((of_all, chosen, hidden, width), tokens, gate_up.codes.dtype, block, MEMORY)
    own, found = numbers.clamp(max=count), [torch.full_like(x, float("nan")) for _ in range(3)]
    for out in found:
        coded_experts(x, gate_up, down, own, weights, out, others)
    if isinstance(configs[0], GemvConfig):
        here = numbers < count
        expected = exact(x, dense(gate_up), dense(down), numbers.where(here, 0), weights.where(here, 0))
    else:
        expected = quantized(x, gate_up, down, own, weights, configs)
    error = (found[0].double() - expected).norm() / expected.norm()
    assert error < 0.015, f"{error:.2e}"  # what stays in the tensor cores for long is less exact
    assert all(torch.equal(out, found[0]) for out in found)


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
@pytest.mark.parametrize("scheme", EXPANDED)
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
