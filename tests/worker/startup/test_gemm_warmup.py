"""Which matrix products run at the start: all of a model's, at numbers of rows without a wide gap."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.cpu import embedding, experts, linear
from quire.models.layers.factory import LayerFactory
from quire.models.model import build_model
from quire.models.spec import read_spec
from quire.models.weights.tensor_options import TensorOptions
from quire.planning.step_limits import StepLimits
from quire.runtime.worker.graph_shapes import GraphShapes
from quire.runtime.worker.startup import gemm_warmup
from quire.runtime.worker.startup.gemm_warmup import Gemm, gemms_of, row_counts, run_gemms, start_warmup
from tests.checkpoints import make_tiny
from tests.parity.cases import CASES
from tests.worker.driver import Driver, config_for

OPTIONS = TensorOptions(torch.device("cpu"), torch.float32)
MODELS = ("qwen3, wide heads", "qwen3 moe", "gemma3", "gpt2")
Shape = tuple[int, int, bool]


@pytest.mark.parametrize("most", [1, 3, 128, 129, 144, 145, 400, 1_000, 8_192, 65_536])
def test_counts_reach_the_most_without_a_wide_gap(most: int) -> None:
    counts = row_counts(most)
    assert counts[0] == 1
    assert counts[-1] == most
    assert counts == sorted(set(counts))
    assert all(
        larger <= 2 * smaller if smaller < 128 else larger - smaller <= max(16, smaller // 12)
        for smaller, larger in itertools.pairwise(counts)
    )


def test_counts_are_few_enough_to_cost_little() -> None:
    assert len(row_counts(8_192)) <= 96
    assert sum(row_counts(8_192)) <= 18 * 8_192


@pytest.mark.parametrize("case", MODELS)
def test_all_products_of_a_step_are_found(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a worker runs in steps of its own; at captured steps' rows too, heads at sampled positions."""
    directory = make_tiny(tmp_path / "model", **CASES[case])
    spec, largest = read_spec(directory), StepLimits(rows=150, tokens=300, length=600)
    captured = GraphShapes(256, largest.rows, largest.tokens, largest.length).all()
    factory = LayerFactory(OPTIONS)
    build_model(spec, factory)
    products = gemms_of(factory.layers, spec.vocab_size, spec.hidden, largest, captured)
    assert _shapes(products) == _shapes_of_steps(directory, monkeypatch)
    assert len(products) == len(_shapes(products))
    for product in products:
        of_head = product.outputs == spec.vocab_size
        listed = row_counts(largest.rows if of_head else largest.tokens)
        assert set(product.rows) == {*listed, *(shape.sampled if of_head else shape.tokens for shape in captured)}
        assert list(product.rows) == sorted(product.rows, reverse=True)
    assert {48, 96} <= set(products[0].rows), "of captured steps alone"


def test_each_product_runs_at_each_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    gemms = [Gemm(6, 4, True, (7, 3, 1)), Gemm(9, 5, False, (2,)), Gemm(3, 6, False, (8, 7))]
    runs = _record_runs(monkeypatch)
    run_gemms(gemms, OPTIONS)
    assert [(rows, shape) for rows, shape, _ in runs] == [
        (rows, (one.outputs, one.columns, one.has_bias)) for one in gemms for rows in one.rows
    ]


def test_the_warmup_runs_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, may_begin = _record_runs(monkeypatch), threading.Event()
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **named: may_begin.wait(9) and empty(*args, **named))
    in_use = start_warmup([Gemm(6, 4, True, (7, 3))], OPTIONS)
    assert not in_use.done()
    may_begin.set()
    assert in_use.result(9)
    assert [name.startswith("gemm-warmup") for *_, name in runs] == [True, True]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")]
)
def test_without_memory_the_warmup_is_skipped(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(torch, "empty", run_out)
    assert not start_warmup([Gemm(6, 4, True, (7, 3))], OPTIONS).result(9)


def _record_runs(patch: pytest.MonkeyPatch) -> list[tuple[int, Shape, str]]:
    """Rows, shape and thread of each product."""
    runs: list[tuple[int, Shape, str]] = []

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert x.is_contiguous()
        assert weight.is_contiguous()
        runs.append((len(x), (*weight.shape, bias is not None), threading.current_thread().name))
        return usual(x, weight, bias)

    usual = gemm_warmup.F.linear
    patch.setattr(gemm_warmup.F, "linear", multiply)
    return runs


def _shapes(products: list[Gemm]) -> set[Shape]:
    return {(product.outputs, product.columns, product.has_bias) for product in products}


def _shapes_of_steps(directory: Path, monkeypatch: pytest.MonkeyPatch) -> set[Shape]:
    seen: set[Shape] = set()
    with monkeypatch.context() as patch:
        for module in (linear, embedding):
            patch.setattr(module, "library", lambda: None)  # as on a GPU, whose products are libraries' as well
        _watch(patch, lambda x, w, bias: seen.add((*w.shape, bias is not None)))
        driver = Driver(config_for(directory, max_model_len=60), groups=len(read_spec(directory).kv_groups()))
        driver.generate([driver.admit(0, [5, 6, 7]), driver.admit(1, [8, 9])], 2)
    return seen


def _watch(patch: pytest.MonkeyPatch, see: Callable[[Tensor, Tensor, Tensor | None], Any]) -> None:
    """Let layers that are built from now on say what they multiply; experts have kernels of their own on a GPU."""

    def multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        see(x, packed, bias)
        return usual(x, packed, bias)

    usual = linear.linear
    patch.setattr(experts, "linear", usual)
    patch.setattr(linear, "linear", multiply)
