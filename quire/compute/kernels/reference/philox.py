"""Random numbers by counting: Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as
1, 2, 3").

A number depends on a key and a counter alone, so a sequence draws equal numbers wherever it is in a batch, after a
preemption and on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Return four random words [4, n] for counters [4, n] and keys [2, n]; all are int64 that hold 32-bit words."""
    multipliers = torch.tensor(_MULTIPLIERS, device=counter.device).unsqueeze(1)
    weyl = torch.tensor(_WEYL, device=counter.device).unsqueeze(1)
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_ROUNDS):
        product = even * multipliers  # wraps to 64 bits, as meant
        high, low = (product >> 32) & _LOW, product & _LOW
        even, odd = high.flip(0) ^ odd ^ key, low.flip(0)
        key = (key + weyl) & _LOW
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def uniform(seed: Tensor, draw: Tensor) -> Tensor:
    """Return numbers [n] float64 in [0, 1) with 53 random bits for keys `seed` and counters `draw`, [n] int64 each."""
    zero = torch.zeros_like(draw)
    counter = torch.stack((draw & _LOW, (draw >> 32) & _LOW, zero, zero))
    words = philox(counter, torch.stack((seed & _LOW, (seed >> 32) & _LOW)))
    bits = (words[0] << 21) | (words[1] >> 11)
    return bits.to(torch.float64) * 2.0**-53
