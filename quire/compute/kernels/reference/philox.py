"""Random numbers by counting: Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as
1, 2, 3").

A number is a function of a key and a counter alone, so a sequence draws the same ones wherever it stands in a batch,
after a preemption and on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Four random words for each counter.

    Args:
        counter: [4, n] int64, each a 32-bit word.
        key: [2, n] int64, each a 32-bit word.

    Returns:
        [4, n] int64, each a 32-bit word.
    """
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
    """One number in [0, 1) with 53 random bits for each (seed, draw).

    Args:
        seed: [n] int64, the key's 64 bits.
        draw: [n] int64, the counter.

    Returns:
        [n] float64.
    """
    zero = torch.zeros_like(draw)
    words = philox(torch.stack((draw & _LOW, (draw >> 32) & _LOW, zero, zero)), _words(seed))
    bits = (words[0] << 21) | (words[1] >> 11)
    return bits.to(torch.float64) * 2.0**-53


def _words(bits: Tensor) -> Tensor:
    return torch.stack((bits & _LOW, (bits >> 32) & _LOW))
