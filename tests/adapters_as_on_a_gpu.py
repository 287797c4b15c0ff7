"""Lets engines on a CPU serve adapters as they do on a GPU: tiles of 16 rows, weights as its kernels take them, and
experts' products all together. Which kernels compute is the test's to say.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from quire.compute.kernels.dispatch import KERNELS, kernel
from quire.compute.kernels.reference.lora import LowRankWeights, Tiles
from quire.models.lora.updates import LowRankUpdates
from quire.runtime.worker import model_runner
from quire.runtime.worker.adapter_rows import AdapterRows
from quire.runtime.worker.worker_parts import WorkerParts


def serve_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For engines that are made from now on."""

    def updates(self: WorkerParts) -> LowRankUpdates | None:
        lora = self._config.lora
        return LowRankUpdates(lora.max_loras, lora.max_lora_rank, "cuda") if lora.enable_lora else None

    monkeypatch.setattr(WorkerParts, "updates", updates)
    if KERNELS["linear", "cpu"] != KERNELS["linear", "cuda"]:
        monkeypatch.setitem(KERNELS, ("linear_and_shrink", "cpu"), f"{__name__}:linear_and_shrink")
    monkeypatch.setattr(model_runner, "AdapterRows", lambda updates, on_gpu: AdapterRows(updates, on_gpu=True))


def linear_and_shrink(
    x: Tensor, packed: Any, bias: Tensor | None, weights: LowRankWeights, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """A CPU's product, and A x as a GPU has it."""
    return kernel("linear", "cpu")(x, packed, bias), kernel("lora_shrink", "cuda")(x, weights, tiles)
