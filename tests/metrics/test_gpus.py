"""Metrics of GPUs, as the driver tells them; and on a machine with one, the driver's own."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.metrics.gpus import GpuReader, GpuReading
from quire.engine.metrics.prometheus import Exposition
from quire.engine.metrics.server_stats import ServerStats
from quire.engine.metrics.stats import Stats
from quire.foundation.config import CacheConfig


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver whose cards' handles are their numbers, and which does not tell their power."""

    def power(handle: int) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetIndex": lambda handle: handle,
        "nvmlDeviceGetName": "card {}".format,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 * 2**30, used=30 * 2**30),
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=93, memory=40),
        "nvmlDeviceGetPowerUsage": power,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 61,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")


@pytest.mark.usefixtures("one_gpu")
def test_what_a_gpu_does_not_tell_is_left_out() -> None:
    stats = ServerStats([Stats()])
    stats.gpus = GpuReader().read()
    assert stats.gpus == [GpuReading(1, "card 1", 30 * 2**30, 80 * 2**30, 0.93, None, 61)]
    page = Exposition(stats, "m", CacheConfig()).text().decode()
    shown = {
        sample.name.removeprefix("quire:gpu_"): (sample.value, sample.labels["gpu"], sample.labels["gpu_name"])
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("quire:gpu_")
    }
    assert shown == {
        "memory_used_bytes": (30 * 2**30, "1", "card 1"),
        "memory_total_bytes": (80 * 2**30, "1", "card 1"),
        "utilization_perc": (0.93, "1", "card 1"),
        "temperature_celsius": (61, "1", "card 1"),
    }


@pytest.mark.usefixtures("one_gpu")
def test_an_engine_has_as_many_gpus_as_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0,2")
    found = GpuReader(2, ranks=2).read()
    assert [(gpu.engine, gpu.index) for gpu in found] == [(0, 3), (0, 1), (1, 0), (1, 2)]
    stats = ServerStats([Stats()])
    stats.gpus = found
    page = Exposition(stats, "m", CacheConfig()).text().decode()
    assert page.count('quire:gpu_memory_used_bytes{engine="0"') == 2
    assert 'quire:gpu_memory_used_bytes{engine="1",gpu="2"' in page


def test_without_a_driver_there_are_none_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    reader = GpuReader()
    with caplog.at_level(logging.WARNING):
        assert reader.read() == reader.read() == []
    assert len(caplog.records) == 1


@pytest.mark.gpu
def test_the_drivers_own_numbers_are_sane() -> None:
    (gpu,) = GpuReader().read()
    assert gpu.name
    assert gpu.memory_used is not None
    assert gpu.memory_total is not None
    assert 0 < gpu.memory_used <= gpu.memory_total
    assert gpu.utilization is None or 0 <= gpu.utilization <= 1
