"""Describes what all mixers have in common that keep no keys and values. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire.models.rope_spec import RopeSpec
from quire.scheduling.kvcache.cache_groups import FULL, CacheForm, Reach


@dataclass(frozen=True)
class Stateful:
    """What mixers without keys and values have in common with attention: they cache, rotate and score nothing.

    Attributes:
        inputs: Width of the input.
        outputs: Width of the output, which is the residual stream's.
    """

    inputs: int
    outputs: int

    form: ClassVar[CacheForm] = CacheForm(())
    reach: ClassVar[Reach] = FULL
    rope: ClassVar[RopeSpec | None] = None
    query_scale: ClassVar[None] = None
    two_sided: ClassVar[bool] = False
    window: ClassVar[int | None] = None
    cap: ClassVar[float | None] = None
    scale: ClassVar[float] = 1.0
    slopes: ClassVar[tuple[float, ...]] = ()
    kv_heads: ClassVar[int] = 1
    source: ClassVar[int | None] = None
    read_width: ClassVar[int] = 0
    rotated: ClassVar[int] = 0
    score_flops: ClassVar[int] = 0

    @property
    def on_a_gpu(self) -> bool:
        """Whether GPUs have kernels for the layer."""
        return True
