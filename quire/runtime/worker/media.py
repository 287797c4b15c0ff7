"""Puts the vectors of media in the place of their placeholder tokens, and keeps those that plans ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.compute.attention.backend import TwoSidedSpans
from quire.foundation.messages.to_engine import Medium, MediumKind, MediumTensor
from quire.foundation.messages.workers import Plan
from quire.models.layers.rotary import Positions
from quire.models.model import MediaVectors
from quire.models.vision.tower import Tower
from quire.planning.images import TOGETHER
from quire.runtime.worker.host_batch import HostBatch
from quire.runtime.worker.host_memory import upload


class MediaEncoder:
    """Computes the vectors of media that plans add, and keeps them until plans drop them.

    Args:
        towers: Compute vectors, by kinds of media.
        device: The towers' device.
    """

    def __init__(self, towers: Mapping[MediumKind, Tower], device: torch.device) -> None:
        self._towers = towers
        self._device = device
        self._vectors: dict[bytes, Tensor] = {}

    def vectors_of(self, plan: Plan, host: HostBatch) -> MediaVectors | None:
        """Return the vectors of the plan's `media_rows`, with their places in the step; None: there are none."""
        for digest in plan.media_dropped:
            del self._vectors[digest]
        for kind, tower in self._towers.items():
            self._compute(tower, [medium for medium in plan.media_added if medium.kind == kind])
        places, vectors_of_pieces = list[np.ndarray[tuple[int], np.dtype[np.int64]]](), list[Tensor]()
        for row in plan.media_rows:
            first_token = int(host.first_tokens[row.row])
            for piece in row.pieces:
                start = first_token + piece.skip
                places.append(np.arange(start, start + piece.count))
                vectors_of_pieces.append(self._vectors[piece.digest][piece.first : piece.first + piece.count])
        if not places:
            return None
        return MediaVectors(upload(np.concatenate(places), self._device), torch.cat(vectors_of_pieces))

    def _compute(self, tower: Tower, media: Sequence[Medium]) -> None:
        for start in range(0, len(media), TOGETHER):
            some = media[start : start + TOGETHER]
            for medium, vectors in zip(some, tower([self._pixels(medium) for medium in some]), strict=True):
                self._vectors[medium.digest] = vectors.clone()  # else one that is kept would keep all of them

    def warm_up(self, size: tuple[int, int]) -> None:
        """Compute empty images of this height and width, as many as the tower computes at once."""
        self._towers["image"]([torch.zeros((*size, 3), dtype=torch.uint8, device=self._device)] * TOGETHER)

    def _pixels(self, medium: Medium) -> Tensor | dict[str, Tensor]:
        """Return a medium's pixels [height, width, 3] uint8, those of a video [frames, height, width, 3], or what else
        the tower takes."""
        if medium.tensors:
            return {name: _tensor(each).to(self._device) for name, each in medium.tensors.items()}
        frames = (-1,) if medium.kind == "video" else ()
        pixels = np.frombuffer(medium.pixels, dtype=np.uint8).reshape(*frames, medium.height, medium.width, 3)
        return torch.from_numpy(pixels.copy()).to(self._device)


def two_sided_spans(plan: Plan, host: HostBatch) -> TwoSidedSpans | None:
    """Return the tokens of a plan's images that see one another; None: there are none."""
    found = [(row.row, piece) for row in plan.media_rows for piece in row.pieces if piece.two_sided]
    if not found:
        return None
    firsts = [int(host.first_tokens[row]) + piece.skip for row, piece in found]
    tokens = [np.arange(first, first + piece.count) for first, (_, piece) in zip(firsts, found, strict=True)]
    columns = [
        [int(host.slots[row]) for row, _ in found],
        [int(host.max_lengths[row]) + piece.skip for row, piece in found],
        [piece.count for _, piece in found],
    ]
    return TwoSidedSpans(torch.from_numpy(np.concatenate(tokens)), *map(torch.tensor, columns))


def with_axes(plan: Plan, host: HostBatch, positions: Positions) -> Positions:
    """Return the positions of a step with those around images, where the model tells time, rows and columns."""
    rows = [row for row in plan.media_rows if row.axes]
    if not rows:
        return positions
    assert positions.lengths is not None, "this model's batches have shifted positions"
    axes = positions.lengths.repeat(3, 1)
    for row in rows:
        own = np.frombuffer(row.axes, dtype=np.int64).reshape(3, -1).copy()
        start = int(host.first_tokens[row.row])
        axes[:, start : start + own.shape[1]] = upload(own, axes.device)
    return replace(positions, axes=axes)


def _tensor(found: MediumTensor) -> Tensor:
    values = np.frombuffer(found.content, dtype=np.dtype(found.dtype)).reshape(found.shape)
    return torch.from_numpy(values.copy())
