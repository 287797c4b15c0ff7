"""What a result says about GPUs: what the driver's library answers, and nothing where there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from quire.bench.system_info import gpus, system_info


def refuse(*_: Any) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver with two cards, of which number 1 has more memory."""
    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetName": lambda card: f"Card {card}",
        "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(total=(card + 1) * 2**30),
        "nvmlDeviceGetCudaComputeCapability": lambda card: (9, 0),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)


@pytest.mark.usefixtures("two_cards")
def test_every_card_with_memory_and_driver() -> None:
    assert system_info()["gpus"] == [
        {"name": "Card 0", "memory.total": "1024 MiB", "driver_version": "580.1", "compute_cap": "9.0"},
        {"name": "Card 1", "memory.total": "2048 MiB", "driver_version": "580.1", "compute_cap": "9.0"},
    ]


def test_none_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert gpus() == []


@pytest.mark.usefixtures("two_cards")
def test_a_driver_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", refuse)
    (found,) = gpus()
    assert "NVML Shared Library Not Found" in found["error"]
