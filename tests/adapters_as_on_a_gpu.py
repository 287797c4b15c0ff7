"""Lets engines on a CPU serve adapters as they do on a GPU: tiles of 16 rows, weights as its kernels take them, and
experts' products all together. Which kernels compute is the test's to say.
"""

from __future__ import annotations

import pytest

from quire.lora.updates import LowRankUpdates
from quire.worker import model_runner
from quire.worker.adapter_rows import AdapterRows
from quire.worker.worker_parts import WorkerParts


def serve_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For engines that are made from now on."""

    def updates(self: WorkerParts) -> LowRankUpdates | None:
        lora = self._config.lora
        return LowRankUpdates(lora.max_loras, lora.max_lora_rank, "cuda") if lora.enable_lora else None

    monkeypatch.setattr(WorkerParts, "updates", updates)
    monkeypatch.setattr(model_runner, "AdapterRows", lambda updates, on_gpu: AdapterRows(updates, on_gpu=True))
