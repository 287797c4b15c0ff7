"""What is multiplied at the start: every product a model has, at numbers of rows that leave no wide gap."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu import experts, linear
from quire.layers.factory import LayerFactory
from quire.layers.layer import Place
from quire.models.model import build_model
from quire.models.spec import read_spec
from quire.worker import warmup
from quire.worker.first_products import distinct_products, row_counts, use_once
from quire.worker.runner import LargestStep
from tests.checkpoints import make_tiny
from tests.parity.cases import CASES
from tests.worker.driver import Driver, config_for

PLACE = Place(torch.device("cpu"), torch.float32)
MODELS = ("qwen3, wide heads", "qwen3 moe", "gemma3", "gpt2")
Seen = set[tuple[int, int, bool]]


@pytest.mark.parametrize("most", [129, 144, 145, 400, 1_000, 8_192, 65_536])
def test_counts_reach_the_most_without_a_wide_gap(most: int) -> None:
    counts = row_counts(most)
    assert counts[0] == most
    assert counts == sorted(set(counts), reverse=True)
    assert counts[-1] == min(144, most)
    assert all(larger - smaller <= max(16, smaller // 12) for larger, smaller in itertools.pairwise(counts))


def test_few_rows_are_left_to_others() -> None:
    """At these a layer may have a kernel that nothing but it asks for; it would be compiled for nobody."""
    assert row_counts(128) == row_counts(1) == []


def test_counts_are_few_enough_to_cost_little() -> None:
    assert len(row_counts(8_192)) <= 64
    assert sum(row_counts(8_192)) <= 16 * 8_192


@pytest.mark.parametrize("case", MODELS)
def test_all_products_of_a_step_are_used(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a worker runs in steps of its own, rows aside; heads up to the reads, others up to the tokens."""
    directory = make_tiny(tmp_path / "model", **CASES[case])
    spec, largest = read_spec(directory), LargestStep(rows=150, tokens=300, length=60)
    of_steps = _shapes_of_steps(directory, monkeypatch)
    seen: dict[tuple[int, int, bool], list[int]] = {}
    _watch(monkeypatch, lambda x, w, bias: seen.setdefault((*w.shape, bias is not None), []).append(len(x)))
    factory = LayerFactory(PLACE)
    model = build_model(spec, factory)
    for layer in factory.layers:
        layer.pull(warmup._Unwritten())
    use_once(distinct_products(factory.layers, spec.vocab_size), model, spec.hidden, largest, PLACE)
    assert seen.keys() == of_steps
    for (outputs, *_), rows in seen.items():
        assert sorted(rows) == sorted(row_counts(largest.rows if outputs == spec.vocab_size else largest.tokens))


def _shapes_of_steps(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen: Seen = set()
    with monkeypatch.context() as patch:
        _watch(patch, lambda x, w, bias: seen.add((*w.shape, bias is not None)))
        driver = Driver(config_for(directory, max_model_len=60), groups=len(read_spec(directory).kv_groups()))
        driver.generate([driver.admit(0, [5, 6, 7]), driver.admit(1, [8, 9])], 2)
    return seen


def _watch(patch: pytest.MonkeyPatch, see: Callable[[Tensor, Tensor, Tensor | None], Any]) -> None:
    """Let layers that are built from now on say what they multiply; experts have kernels of their own on a card."""

    def multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        see(x, packed, bias)
        return usual(x, packed, bias)

    usual = linear.linear
    patch.setattr(experts, "linear", usual)
    patch.setattr(linear, "linear", multiply)
