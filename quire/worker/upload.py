"""Values of the host on their way to the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Values = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | npt.NDArray[np.generic]


def upload(values: Values, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """`values` on the device, in the stream's order. From pinned memory, or else the copy would wait for the stream."""
    if device.type == "cpu":
        return torch.as_tensor(values, dtype=dtype)
    return torch.as_tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)
