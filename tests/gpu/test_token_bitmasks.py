"""Masked requests on the card: what they sample, judged by transformers on a CPU, and that no launch waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.foundation.clock import SystemClock
from quire.runtime.executor.gpu_executor import GpuExecutor
from quire.runtime.worker.graph_shapes import GraphShape
from quire.runtime.worker.replay import CudaGraphs
from quire.runtime.worker.step import Step
from quire.runtime.worker.worker import Worker
from tests.checkpoints import make_llama
from tests.engine.harness import Engine
from tests.executor.masked_requests import TOKENS, serve
from tests.reference import Reference
from tests.worker.driver import config_for

pytestmark = pytest.mark.gpu
TIE = 1e-3
"""Logits and probabilities this close together are equal in fp32 on another device."""
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "small chunks": {"max_num_batched_tokens": 24},
    "preempted, recomputed": {"num_gpu_blocks_override": 12, "preemption_mode": "recompute"},
    "preempted, swapped": {"num_gpu_blocks_override": 12, "preemption_mode": "swap"},
    "processed log probabilities": {"logprobs_mode": "processed_logprobs"},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tiny"), tokenizer=False, std=0.12)


def on_card(tiny: Path, settings: dict[str, Any], *, captured: int = 128) -> Engine:
    config = config_for(tiny, device="cuda", swap_space=0.001, max_cudagraph_capture_size=captured, **settings)
    return serve(Reference(tiny), GpuExecutor(config, SystemClock()), settings, TIE)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_card_samples_what_the_masks_leave(tiny: Path, settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replay, replayed = CudaGraphs.replay, list[GraphShape | None]()

    def watched(self: CudaGraphs, step: Step) -> Tensor:
        replayed.append(step.shape)
        return replay(self, step)

    monkeypatch.setattr(CudaGraphs, "replay", watched)
    on_card(tiny, SETTINGS[settings]).client.close()
    assert len(replayed) > TOKENS


def test_steps_without_graphs_say_the_same(tiny: Path) -> None:
    on_card(tiny, {}, captured=0).client.close()


def test_no_launch_waits_for_the_card(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that of a step nor that of its masked rows' sampling, once each has happened before."""
    strict, calls = [False], list[str]()

    def strictly(name: str) -> None:
        method = getattr(Worker, name)

        def call(self: Worker, argument: Any) -> Any:
            calls.append(name)
            torch.cuda.set_sync_debug_mode("error" if strict[0] else "default")
            try:
                return method(self, argument)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(Worker, name, call)

    strictly("launch")
    strictly("submit_bitmasks")
    on_card(tiny, {}).client.close()
    strict[0] = True
    calls.clear()
    on_card(tiny, {}).client.close()
    assert calls.count("submit_bitmasks") > TOKENS
