"""Triton's norms against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.reference import norm as reference
from quire.compute.kernels.triton.norm import WIDEST, layer_norm, rms_norm

DTYPES = [torch.float32, torch.bfloat16]


def normal(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def poisoned(x: Tensor) -> Tensor:
    return torch.full(x.shape, float("nan"), dtype=x.dtype, device=x.device)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Equal but for the order of a sum; where a bf16 result is rounded, a neighbour in few places."""
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
        return
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=1e-6)
    assert (found != expected).sum() <= 1 + 0.02 * found.numel()


def check_rms(x: Tensor, weight: Tensor, delta: Tensor | None) -> None:
    ours, theirs = x.clone(), x.clone()
    found, expected = poisoned(x), poisoned(x)
    rms_norm(ours, weight, 1e-5, found, delta)
    reference.rms_norm(theirs, weight, 1e-5, expected, delta)
    assert torch.equal(ours, theirs)
    assert_near(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 63), (17, 1024), (127, 128), (129, 40), (2, 5000), (1, 20000)])
def test_rms_norm(rows: int, width: int, added: bool, dtype: torch.dtype, device: str) -> None:
    delta = normal(device, dtype, rows, width) if added else None
    check_rms(normal(device, dtype, rows, width), normal(device, dtype, width), delta)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "width"), [(1, 5, 128), (17, 3, 24), (129, 7, 16), (3, 2, 1500)])
def test_rms_norm_by_head(rows: int, heads: int, width: int, dtype: torch.dtype, device: str) -> None:
    x = normal(device, dtype, rows, heads, width)
    check_rms(x, normal(device, dtype, heads, width), None)
    check_rms(x, normal(device, dtype, width), normal(device, dtype, rows, heads, width))


@pytest.mark.parametrize("added", [False, True])
def test_rows_in_fp16(added: bool, device: str) -> None:
    dtype = torch.float16
    delta = normal(device, dtype, 3, 200) if added else None
    check_rms(normal(device, dtype, 3, 200), normal(device, dtype, 200), delta)


def test_rms_norm_applies_an_fp32_weight_before_it_rounds(device: str) -> None:
    x, weight = normal(device, torch.bfloat16, 17, 3, 48), normal(device, torch.float32, 3, 48)
    check_rms(x, weight, None)
    rms_norm(x, weight, 1e-5, out := poisoned(x))
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(out.double(), exact, rtol=2**-8 * 1.01, atol=1e-6)


def test_rms_norm_of_a_part_of_something_wider(device: str) -> None:
    whole, weight = normal(device, torch.float32, 17, 9, 16), normal(device, torch.float32, 4, 16)
    before = whole.clone()
    rms_norm(whole[:, 2:6], weight, 1e-5, out := poisoned(whole[:, 2:6]))
    reference.rms_norm(before[:, 2:6].clone(), weight, 1e-5, expected := poisoned(out))
    assert torch.equal(whole, before)
    assert_near(out, expected)
    streams, delta = normal(device, torch.float32, 5, 90), normal(device, torch.float32, 5, 40)
    before = streams.clone()
    rms_norm(streams[:, 10:50], weight[0].repeat(3)[:40], 1e-5, out := poisoned(delta), delta)
    before[:, 10:50] += delta
    assert torch.equal(streams, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 63), (129, 128), (17, 1600), (1, 5000)])
def test_layer_norm(rows: int, width: int, added: bool, dtype: torch.dtype, device: str) -> None:
    x, weight, bias = normal(device, dtype, rows, width) + 3, normal(device, dtype, width), normal(device, dtype, width)
    delta = normal(device, dtype, rows, width) if added else None
    ours, theirs, found, expected = x.clone(), x.clone(), poisoned(x), poisoned(x)
    layer_norm(ours, weight, bias, 1e-5, found, delta)
    reference.layer_norm(theirs, weight, bias, 1e-5, expected, delta)
    assert torch.equal(ours, theirs)
    assert_near(found, expected)


def test_nothing_is_normed(device: str) -> None:
    empty, weight = torch.empty(0, 8, device=device), torch.ones(8, device=device)
    rms_norm(empty, weight, 1e-5, torch.empty_like(empty))
    layer_norm(empty, weight, weight, 1e-5, torch.empty_like(empty))


def test_rows_that_fit_no_program_are_refused(device: str) -> None:
    x, weight = torch.zeros(1, WIDEST + 1, device=device), torch.ones(WIDEST + 1, device=device)
    with pytest.raises(ValueError, match=str(WIDEST + 1)):
        rms_norm(x, weight, 1e-5, torch.empty_like(x))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [768, 2048, 3584, 4096, 5120, 8192, 16384, 32768])
@pytest.mark.parametrize("rows", [1, 255, 8192])
def test_norms_of_real_sizes(rows: int, width: int) -> None:
    x, weight, bias, delta = (
        normal("cuda", torch.bfloat16, *s) for s in ((rows, width), (width,), (width,), (rows, width))
    )
    check_rms(x, weight, None)
    check_rms(x, weight, delta)
    check_rms(x, weight.float(), delta)
    layer_norm(x.clone(), weight, bias, 1e-5, found := poisoned(x), delta)
    reference.layer_norm(x.clone(), weight, bias, 1e-5, expected := poisoned(x), delta)
    assert_near(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3_000])
def test_kernels_in_a_graph_wait_for_those_before_them(rows: int) -> None:
    """Each adds what the one before made; on their own, one after another, they say the same to the last bit."""
    weight, first, delta = (normal("cuda", torch.bfloat16, *s) for s in ((4096,), (rows, 4096), (rows, 4096)))

    def chain(x: Tensor, a: Tensor, b: Tensor, between: Callable[[], object]) -> Tensor:
        for _ in range(60):
            rms_norm(x, weight, 1e-5, b, a)
            between()
            a, b = b, a
        return a

    expected = chain(first.clone(), delta.clone(), torch.empty_like(delta), torch.cuda.synchronize)
    x, a, b = first.clone(), delta.clone(), torch.empty_like(delta)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(first)
        a.copy_(delta)
        found = chain(x, a, b, lambda: None)
    for _ in range(10):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, expected)
