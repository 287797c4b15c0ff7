"""What the NVIDIA driver says of the GPUs that a server uses: memory, utilization, power, temperature.

Owns the questions to NVML. Knows nothing about Prometheus; needs no torch and no CUDA context.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.foundation.config import environment
from quire.planning.machine import handle_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuReading:
    """One GPU now; None for what it does not tell.

    Attributes:
        index: The number that NVML and nvidia-smi give it.
        memory_used, memory_total: Bytes, of all processes.
        utilization: Share of the last moments in which any kernel ran; 1 is always.
        engine: The number of the engine that uses it.
    """

    index: int
    name: str
    memory_used: int | None = None
    memory_total: int | None = None
    utilization: float | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    engine: int = 0


class GpuReader:
    """Reads the GPUs that this server may use. Calls take milliseconds, so they belong in a thread.

    Args:
        ranks: GPUs of each engine: engine 0 has the first of those that are visible, engine 1 the next.
    """

    def __init__(self, engines: int = 1, *, ranks: int = 1) -> None:
        import pynvml  # not before: few processes read GPUs

        self._num_gpus = engines * ranks
        self._ranks = ranks
        self._nvml: Any = pynvml
        self._handles: list[Any] | None = None

    def read(self) -> list[GpuReading]:
        """All GPUs, by engine and rank; empty where there is no driver."""
        if self._handles is None:
            self._handles = self._open()
        return [self._reading(handle, number // self._ranks) for number, handle in enumerate(self._handles)]

    def _open(self) -> list[Any]:
        try:
            self._nvml.nvmlInit()
            gpus = [environment.gpu_of_engine(number) for number in range(self._num_gpus)]
            return [handle_of(gpu) for gpu in gpus if gpu is not None]
        except self._nvml.NVMLError as error:
            logger.warning("There are no metrics of GPUs: the NVIDIA driver says: %s", error)
            return []

    def _reading(self, handle: Any, engine: int) -> GpuReading:
        nvml = self._nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        return GpuReading(
            self._ask(nvml.nvmlDeviceGetIndex, handle) or 0,
            str(self._ask(nvml.nvmlDeviceGetName, handle) or ""),
            None if memory is None else memory.used,
            None if memory is None else memory.total,
            None if rates is None else rates.gpu / 100,
            None if milliwatts is None else milliwatts / 1000,
            self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            engine,
        )

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, or None if there is none: a part of a GPU (MIG), for example, has no power of its own."""
        try:
            return question(*arguments)
        except self._nvml.NVMLError:
            return None
