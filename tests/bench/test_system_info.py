"""What a result says about GPUs: what the driver's library answers, and nothing where there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from quire.tools.bench.system_info import gpu_links, gpus, system_info


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
        "nvmlDeviceGetP2PStatus": lambda one, other, what: pynvml.NVML_P2P_STATUS_NOT_SUPPORTED,
        "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: pynvml.NVML_TOPOLOGY_SYSTEM,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)


@pytest.mark.usefixtures("two_cards")
def test_every_card_with_memory_and_driver() -> None:
    assert system_info()["gpus"] == [
        {"name": "Card 0", "memory.total": "1024 MiB", "driver_version": "580.1", "compute_cap": "9.0"},
        {"name": "Card 1", "memory.total": "2048 MiB", "driver_version": "580.1", "compute_cap": "9.0"},
    ]


@pytest.mark.usefixtures("two_cards")
def test_cards_are_linked_as_their_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eighteen NVLinks, of which one is down; a card answers for more with an error."""
    status = {2: pynvml.NVML_P2P_STATUS_OK, 0: pynvml.NVML_P2P_STATUS_OK}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetP2PStatus", lambda one, other, what: status[what])
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetNvLinkState", lambda card, link: int(link != 4) if link < 18 else refuse()
    )
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTopologyCommonAncestor", lambda one, other: pynvml.NVML_TOPOLOGY_SYSTEM)
    assert gpu_links() == {"0-1": "NV17"}
    status[2] = pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
    assert gpu_links() == {"0-1": "SYS"}
    status[0] = pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORED
    assert gpu_links() == {"0-1": "SYS, no peer access"}


def test_none_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert (gpus(), gpu_links()) == ([], {})


@pytest.mark.usefixtures("two_cards")
def test_a_driver_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", refuse)
    (found,) = gpus()
    assert "NVML Shared Library Not Found" in found["error"]
