"""GGUF files as a Checkpoint: under the names of a checkpoint in Hugging Face layout, dequantized as they are read.

Reading into a uint8 tensor gives a quantized tensor's blocks as they are, row by row; see
compute/kernels/reference/gguf_blocks.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quire.compute.gguf.architectures import WeightSource, weight_sources
from quire.compute.gguf.model_files import SUFFIX, read_model
from quire.compute.gguf.tensor_types import QUANTIZED
from quire.compute.kernels.reference.gguf_blocks import dequantize
from quire.errors import CheckpointError
from quire.models.weights.checkpoint import StoredTensor

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WEIGHTS_AT_ONCE = 1 << 22
"""How many weights are dequantized at a time."""


def find_gguf_files(directory: Path) -> list[Path]:
    """Return the GGUF files in a model's directory; empty if the model is in another format."""
    return sorted(directory.glob(f"*{SUFFIX}"))


class GgufCheckpoint:
    """The GGUF model of a directory. Raises CheckpointError if a file is broken or not served."""

    def __init__(self, directory: Path) -> None:
        model = read_model(find_gguf_files(directory))
        self._sources = weight_sources(model)
        self._files = {path: os.open(path, os.O_RDONLY) for path in model.paths}

    def contents(self) -> dict[str, StoredTensor]:
        return {name: StoredTensor(source.shape, source.tensor.form.name) for name, source in self._sources.items()}

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        """Copy the window of `out`'s shape that begins at `start` into `out`, dequantized.

        If `out` is uint8, the window is of the weight's blocks, [rows, bytes].
        """
        source = self._sources[name]
        if out.dim() == 1:
            self._read_rows(source, out.unsqueeze(0), (0, start[0] if start else 0))
        else:
            assert out.dim() == 2
            row, column = start or (0, 0)
            self._read_rows(source, out, (row, column))

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _read_rows(self, source: WeightSource, out: Tensor, start: tuple[int, int]) -> None:
        row, column = start
        each = max(1, _WEIGHTS_AT_ONCE // source.shape[-1])
        for first in range(0, len(out), each):
            part = out[first : first + each]
            raw = self._raw_rows(source, row + first, len(part))
            if part.dtype == torch.uint8:
                part.copy_(raw[:, column : column + part.shape[1]])
                continue
            form = source.tensor.form.name
            values = dequantize(raw, form) if form in QUANTIZED else raw.view(_FLOATS[form])
            values = values[:, column : column + part.shape[1]]
            part.copy_(values.float() - source.less if source.less else values)

    def _raw_rows(self, source: WeightSource, first: int, count: int) -> Tensor:
        """Read the stored bytes of `count` rows of the weight from row `first` on: [rows, bytes] uint8."""
        if not source.heads:
            return self._stored_rows(source, first, count)
        rows = source.shape[0] if len(source.shape) > 1 else source.shape[-1]
        return self._rotated_rows(source, first, count, rows // source.heads)

    def _rotated_rows(self, source: WeightSource, first: int, count: int, width: int) -> Tensor:
        """Read rows of a weight whose file has the two halves of each head interleaved: [rows, bytes] uint8.

        Whole heads of `width` rows are read and put in order.
        """
        if len(source.shape) == 1:  # a bias: its elements are what turns
            stored = self._stored_rows(source, 0, 1).view(source.shape[0], -1)
            return stored.view(-1, width // 2, 2, stored.shape[1]).transpose(1, 2).reshape(1, -1)
        begin, end = first // width * width, -(-(first + count) // width) * width
        stored = self._stored_rows(source, begin, end - begin)
        halves = stored.view(-1, width // 2, 2, stored.shape[1]).transpose(1, 2).reshape(stored.shape)
        return halves[first - begin : first - begin + count]

    def _stored_rows(self, source: WeightSource, first: int, count: int) -> Tensor:
        tensor = source.tensor
        rows = np.empty((count, tensor.row_bytes), dtype=np.uint8)
        rest, at = memoryview(rows.data).cast("B"), tensor.offset + (source.first_row + first) * tensor.row_bytes
        while rest:
            read = os.preadv(self._files[tensor.path], [rest], at)
            if not read:
                raise CheckpointError(f"{tensor.path} became shorter while it was read: download it again.")
            rest, at = rest[read:], at + read
        return torch.from_numpy(rows)
