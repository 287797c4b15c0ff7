"""The activation of an expert, as plain data without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Activation:
    """How a gate and an up become one value, or an up alone does.

    Attributes:
        kind: `silu` for silu(gate) · up (Shazeer 2020, SwiGLU), `gelu` for gelu(gate) · up with gelu in its tanh form,
            `swigluoai` for gate · σ(alpha · gate) · (up + 1), as gpt-oss has it, or `relu2` for max(up, 0)² (So et al.
            2021, Primer), which takes no gate.
        alpha: Factor of the gate within σ; 1 for `silu`.
        limit: Gates are at most this, and ups between this and its negative; None: there is no limit. With `silu` it
            bounds silu(gate), as in Step 3.5.
    """

    kind: Literal["silu", "gelu", "swigluoai", "relu2"] = "silu"
    alpha: float = 1.0
    limit: float | None = None

    @property
    def added(self) -> float:
        """What is added to ups."""
        return 1.0 if self.kind == "swigluoai" else 0.0

    @property
    def products(self) -> int:
        """How many products of an expert's input the activation takes: a gate and an up, or an up alone."""
        return 1 if self.kind == "relu2" else 2


SILU = Activation()
