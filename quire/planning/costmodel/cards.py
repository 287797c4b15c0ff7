"""Devices that can be bought or rented, by their makers' figures, and what share of these real steps reach.

Figures are those of NVIDIA's data sheets: dense products with fp32 sums, without sparsity; memory in MiB as
`nvidia-smi` shows it. Only an H200 was measured with Quire; the others are taken to reach the same shares.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.planning.costmodel.hardware import GPUS, Hardware
from quire.planning.costmodel.step_time import Shares

MIB = 2**20


@dataclass(frozen=True)
class Card:
    """A GPU as its maker describes it.

    Attributes:
        bandwidth: Bytes a second from its memory.
        flops: bf16 operations a second.
        fp8_flops: fp8 operations a second; None if it has no fp8.
        link: Bytes a second to other cards of the same host, both directions together.
        nvlink: Whether the link is NVLink, and not PCIe.
    """

    name: str
    mib: int
    bandwidth: float
    flops: float
    fp8_flops: float | None
    link: float
    nvlink: bool
    capability: tuple[int, int]

    @property
    def memory_bytes(self) -> int:
        """Bytes of the card's whole memory."""
        return self.mib * MIB

    @property
    def is_measured(self) -> bool:
        """Whether predictions were compared with steps of this card."""
        return self.name == MEASURED

    @property
    def hardware(self) -> Hardware:
        """What the card sustains: the shares of its figures that an H200 sustains of its own."""
        reached, own = GPUS["H200"], CARDS["h200"]
        return Hardware(
            self.flops * reached.flops / own.flops,
            self.bandwidth * reached.bandwidth / own.bandwidth,
            reached.host_bandwidth,
            reached.overhead_ms,
            reached.launch_ms,
            reached.slow_float32,
        )

    @property
    def fp8_speedup(self) -> float:
        """How many times as fast products of fp8 are."""
        return self.fp8_flops / self.flops if self.fp8_flops else 1.0


MEASURED = "NVIDIA H200"
CARDS = {
    "b200": Card("NVIDIA B200", 183_359, 8.0e12, 2_250e12, 4_500e12, 1_800e9, True, (10, 0)),
    "h200": Card(MEASURED, 143_771, 4.8e12, 989e12, 1_979e12, 900e9, True, (9, 0)),
    "h100": Card("NVIDIA H100 SXM", 81_559, 3.35e12, 989e12, 1_979e12, 900e9, True, (9, 0)),
    "h100-pcie": Card("NVIDIA H100 PCIe", 81_559, 2.0e12, 756e12, 1_513e12, 128e9, False, (9, 0)),
    "a100": Card("NVIDIA A100 SXM 80GB", 81_920, 2.039e12, 312e12, None, 600e9, True, (8, 0)),
    "a100-40gb": Card("NVIDIA A100 SXM 40GB", 40_960, 1.555e12, 312e12, None, 600e9, True, (8, 0)),
    "l40s": Card("NVIDIA L40S", 46_068, 0.864e12, 362e12, 733e12, 64e9, False, (8, 9)),
    "l4": Card("NVIDIA L4", 23_034, 0.3e12, 121e12, 242e12, 64e9, False, (8, 9)),
    "a10": Card("NVIDIA A10", 23_028, 0.6e12, 125e12, None, 64e9, False, (8, 6)),
    "5090": Card("NVIDIA GeForce RTX 5090", 32_607, 1.792e12, 209.5e12, 419e12, 128e9, False, (12, 0)),
    "4090": Card("NVIDIA GeForce RTX 4090", 24_564, 1.008e12, 165.2e12, 330.3e12, 64e9, False, (8, 9)),
}
"""Cards by their word for --gpu."""

GPU_SHARES = Shares(
    products=0.955,
    expert_products=0.45,
    scores=0.877,
    weights=0.938,
    kv_cache=0.98,
    overlap=2.11,
    layer_ms=0.0088,
    experts_ms=0.006,
    row_ms=0.002,
    request_ms=1.5,
    server_ms=0.6,
)
"""Fitted to the rows of docs/performance.md for one H200; `quire plan --check` prints how far off each one is."""

CPU_SHARES = Shares(
    products=0.5,
    expert_products=0.5,
    scores=0.25,
    weights=1.0,
    kv_cache=0.5,
    overlap=1.0,
    layer_ms=0.02,
    experts_ms=0.02,
    row_ms=0.01,
    request_ms=1.0,
    server_ms=3.0,
)
"""A guess, within a factor of two or so: processors differ, and none was fitted."""


def card(name: str) -> Card:
    """The card that --gpu names. Raises ConfigError for a name that is not in the table."""
    if name.lower() not in CARDS:
        raise ConfigError(f"--gpu {name} is not known: there are {', '.join(CARDS)}, and cpu.", param="gpu")
    return CARDS[name.lower()]


def word_of(name: str, memory_bytes: int) -> str | None:
    """Return the word for --gpu of a card, by its driver's name and memory; None if it is not in the table."""
    said = name.upper().replace("-", " ").split()
    alike = [word for word in CARDS if word.split("-")[0].upper() in said]

    def difference(word: str) -> tuple[int, bool]:
        return abs(CARDS[word].mib - memory_bytes // 2**20) // 4_096, word.endswith("pcie") != ("PCIE" in said)

    return min(alike, key=difference, default=None)
