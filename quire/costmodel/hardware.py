"""What a kind of device can do. Figures are sustained ones, as measured, not a data sheet's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One device.

    Attributes:
        flops: Floating-point operations a second in matrix products of the model's dtype.
        bandwidth: Bytes a second from its own memory.
        host_bandwidth: Bytes a second to or from host memory, for swapping.
        overhead_ms: Of any step, however small.
    """

    flops: float
    bandwidth: float
    host_bandwidth: float
    overhead_ms: float


CPU_CORE = Hardware(flops=100e9, bandwidth=10e9, host_bandwidth=4e9, overhead_ms=1.0)
"""One core of a server processor with AVX-512; a step's time is corrected by what is measured."""


def cpu(cores: int) -> Hardware:
    """A processor with that many cores; memory is shared, so bandwidth grows with the first few only."""
    return Hardware(
        flops=cores * CPU_CORE.flops,
        bandwidth=min(cores, 8) * CPU_CORE.bandwidth,
        host_bandwidth=CPU_CORE.host_bandwidth,
        overhead_ms=CPU_CORE.overhead_ms,
    )
