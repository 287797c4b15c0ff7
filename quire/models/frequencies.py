"""How fast each pair of a head's dimensions turns with the position, by kind of rotary scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.models.spec import Llama3Scaling, RopeSpec


def rotary_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """[head_dim / 2] fp32, radians a position: theta^(-2i/d), then scaled."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    return frequencies if rope.scaling is None else _llama3(frequencies, rope.scaling)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slow frequencies (long wavelengths) divided by the factor, fast ones kept, a linear blend between."""
    turns = scaling.original_max_len * frequencies / (2 * math.pi)  # over the length the model was first trained on
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor
