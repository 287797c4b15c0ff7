"""What a rehearsal misses is compiled in threads, once, under the keys that launches ask for; a failure costs time."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from quire.compute.kernels.triton.launching.precompiler import Precompiler
from tests.kernels.triton.not_interpreted import printed_by


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cache = str(tmp_path_factory.mktemp("cache"))
    result: dict[str, Any] = json.loads(
        printed_by("tests.kernels.triton.launching.precompiling", TRITON_CACHE_DIR=cache)
    )
    return result


def test_each_specialisation_is_begun_once(found: dict[str, Any]) -> None:
    assert found["names"] == ["_embed", "_embed", "_compute_slot_mapping"]


def test_compiled_by_the_threads_once_these_are_prepared(found: dict[str, Any]) -> None:
    (prepared,) = found["prepared"]
    assert prepared.startswith("compile")
    assert [(name, hit) for name, hit, _ in found["ahead"]] == [("_embed", False), ("_embed", False)]
    assert all(thread.startswith("compile") for *_, thread in found["ahead"])


def test_later_launches_compile_only_what_failed(found: dict[str, Any]) -> None:
    assert found["later"] == [["_compute_slot_mapping", False, "MainThread"]]


def test_triton_cache_on_disk_has_it_under_its_own_key(found: dict[str, Any]) -> None:
    assert found["afresh"] == [[name, True, "MainThread"] for name in ("_embed", "_embed", "_compute_slot_mapping")]


def test_products_wait_for_the_run_but_for_those_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would load cuBLAS's kernels one after another."""
    run: list[str] = []
    monkeypatch.setattr(F, "linear", lambda x, weight, bias=None: run.append(threading.current_thread().name))
    x, weight = torch.zeros(2, 3), torch.zeros(5, 3)
    with Precompiler(1, lambda *_: None, lambda: None) as precompiler, ThreadPoolExecutor(1, "other") as other:
        with precompiler.warmup():
            assert F.linear(x, weight).shape == (2, 5)
            other.submit(lambda: F.linear(x, weight, None)).result()
        F.linear(x, weight)
    assert run == ["other_0", "MainThread"]
