"""What a checkpoint says about the pixels that its tower reads. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
CHANNELS = 3
SAMPLING = ("fps", "num_frames", "min_frames", "max_frames")
"""Settings of processors by which frames of videos are chosen."""


@dataclass(frozen=True)
class PixelValues:
    """How pixels of eight bits become numbers: value · scale, less the mean, divided by the deviation of its colour.

    Attributes:
        scale: The factor; None: there is none.
        mean, std: One for each colour; None: values are not normalised.
    """

    scale: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """The number of each value of each colour, [256, 3], computed as transformers does it."""
        import numpy as np  # which processes that read text alone do without

        values = np.repeat(np.arange(256, dtype=np.float64)[:, None], CHANNELS, axis=1)
        numbers = (values if self.scale is None else values * self.scale).astype(np.float32)
        if self.mean is None or self.std is None:
            return numbers
        return np.asarray((numbers - np.array(self.mean, np.float32)) / np.array(self.std, np.float32), np.float32)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> PixelValues:
        """Read the settings of an image processor."""
        scale = float(settings.get("rescale_factor", 1 / 255)) if settings.get("do_rescale", True) else None
        if not settings.get("do_normalize", True):
            return cls(scale, None, None)
        return cls(
            scale, _colours(settings.get("image_mean", _CLIP_MEAN)), _colours(settings.get("image_std", _CLIP_STD))
        )


def _colours(value: Any) -> tuple[float, ...]:
    return tuple(map(float, value)) if isinstance(value, list | tuple) else (float(value),) * CHANNELS
