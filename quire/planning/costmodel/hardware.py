"""What a kind of device can do: sustained figures, as measured, not a data sheet's."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Hardware:
    """One device.

    Attributes:
        flops: Floating-point operations a second in matrix products of bfloat16.
        bandwidth: Bytes a second from its own memory.
        host_bandwidth: Bytes a second to or from host memory, for swapping.
        overhead_ms: Milliseconds that any step takes, however small.
        launch_ms: Milliseconds that a layer takes if each of its kernels is launched by itself, however little it does.
        slow_float32: How many times as long products of float32 take as those of bfloat16.
    """

    flops: float
    bandwidth: float
    host_bandwidth: float
    overhead_ms: float
    launch_ms: float = 0.0
    slow_float32: float = 1.0

    def at(self, dtype: str) -> Hardware:
        """Return this device with the speed of its products in `dtype`."""
        return replace(self, flops=self.flops / self.slow_float32) if dtype == "float32" else self


CPU_CORE = Hardware(flops=100e9, bandwidth=10e9, host_bandwidth=4e9, overhead_ms=1.0)
"""One core of a server processor with AVX-512; a step's time is corrected by what is measured."""

GPUS: dict[str, Hardware] = {
    "H200": Hardware(690e12, 4.25e12, 40e9, 0.2, 0.25, 15.0),
    "H100": Hardware(690e12, 3.0e12, 40e9, 0.2, 0.25, 15.0),
    "A100": Hardware(260e12, 1.7e12, 20e9, 0.3, 0.25, 15.0),
    "L40": Hardware(180e12, 0.75e12, 20e9, 0.3, 0.25, 4.0),
    "L4": Hardware(60e12, 0.26e12, 10e9, 0.3, 0.25, 4.0),
}
"""GPUs by a word in the name that the driver gives them."""
OTHER_GPU = Hardware(100e12, 0.8e12, 20e9, 0.3, 0.25, 4.0)


def cpu(cores: int) -> Hardware:
    """Return a CPU with so many cores; they share memory, so bandwidth grows with the first few only."""
    return replace(CPU_CORE, flops=cores * CPU_CORE.flops, bandwidth=min(cores, 8) * CPU_CORE.bandwidth)


def gpu(name: str) -> Hardware:
    """Return the GPU that the driver calls `name`; a middling one if this GPU was not measured."""
    return next((found for word, found in GPUS.items() if word in name), OTHER_GPU)
