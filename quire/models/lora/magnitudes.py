"""DoRA's magnitudes: the outputs of a module are scaled by m / ‖W + s · B A‖, row by row (Liu et al. 2024, eq. 5).

Norms are taken once, when an adapter is read, from the base model's weights as their files have them: whole rows, of
those outputs that are this rank's. Where a rank's product is a summand, factors scale it as they scale the sum. Knows
nothing about slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.compute.mesh import Span
from quire.errors import CheckpointError
from quire.models.lora.targets import Target, take_spans
from quire.models.weights.checkpoint import READABLE_DTYPES, Checkpoint

OpenCheckpoint = Callable[[], Checkpoint]
"""Opens the base model's files, under the names that models use."""
_AT_ONCE = 1 << 24
"""Elements of a weight whose norms are taken together."""


class BaseNorms:
    """Reads weights of the base model, and closes its files in the end."""

    def __init__(self, open_checkpoint: OpenCheckpoint) -> None:
        self._open = open_checkpoint
        self._checkpoint: Checkpoint | None = None

    def __enter__(self) -> BaseNorms:
        return self

    def __exit__(self, *error: object) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()

    def factors(self, module: str, target: Target, magnitudes: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """What scales a module's outputs y, and what is added to them then, so that its bias stays as it is.

        Args:
            target: The module, of which this rank has a part.
            magnitudes: [rows].
            a, b: fp32 [rank, columns] and [rows, rank], B times the adapter's scale.

        Returns:
            Factors and summands, fp32 [this rank's rows]: y becomes factor · y + summand.

        Raises:
            CheckpointError: The base model's weights are quantized, or rows of them are 0.
        """
        if self._checkpoint is None:
            self._checkpoint = self._open()
        contents = self._checkpoint.contents()
        stored = contents.get(f"{module}.weight")
        if stored is None or stored.dtype not in READABLE_DTYPES:
            raise CheckpointError(
                f"{module} has quantized weights, of which DoRA's norms cannot be taken: serve the model as it was "
                "before, or merge the adapter into it"
            )
        part = target.part
        assert part is not None, "other ranks have it"
        norms = [self._norms(f"{module}.weight", target, span, a, b) for span in part.rows]
        factors = take_spans(magnitudes.float(), 0, part.rows) / torch.cat(norms)
        if not factors.isfinite().all():
            raise CheckpointError(f"{module} has magnitudes for outputs whose weights are all 0")
        if not part.adds_bias or f"{module}.bias" not in contents:
            return factors, torch.zeros_like(factors)
        bias = torch.empty(target.rows)
        self._checkpoint.read(f"{module}.bias", bias)
        return factors, (1 - factors) * take_spans(bias, 0, part.rows)

    def _norms(self, name: str, target: Target, span: Span, a: Tensor, b: Tensor) -> Tensor:
        """‖W + B A‖ of the span's rows, fp32 [rows of the span]."""
        assert self._checkpoint is not None
        norms, each = torch.empty(span.count), max(1, _AT_ONCE // target.columns)
        for first in range(0, span.count, each):
            begin, end = span.start + first, span.start + min(first + each, span.count)
            own = b[begin:end] @ a  # [some rows, columns]
            weight = torch.empty(own.shape[::-1] if target.transposed else own.shape)
            self._checkpoint.read(name, weight, (0, begin) if target.transposed else (begin, 0))
            torch.linalg.vector_norm(
                own.add_(weight.T if target.transposed else weight), dim=1, out=norms[first : first + each]
            )
        return norms
