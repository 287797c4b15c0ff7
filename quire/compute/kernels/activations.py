"""The activation of an MLP with a gate, as plain data without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Activation:
    """How a gate and an up become one value.

    Attributes:
        kind: `silu` for silu(gate) · up (Shazeer 2020, SwiGLU), or `swigluoai` for gate · σ(alpha · gate) · (up + 1),
            as gpt-oss has it.
        alpha: Factor of the gate within σ; 1 for `silu`.
        limit: Gates are at most this, and ups between this and its negative; None: there is no limit.
    """

    kind: Literal["silu", "swigluoai"] = "silu"
    alpha: float = 1.0
    limit: float | None = None

    @property
    def added(self) -> float:
        """What is added to ups."""
        return 1.0 if self.kind == "swigluoai" else 0.0


SILU = Activation()
