"""Checkpoints whose experts lie in one tensor a layer, under the names of single experts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from quire.models.weights.checkpoint import Checkpoint, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor


class StackedExperts:
    """A checkpoint whose experts are stacked as transformers 5 holds them, under the names of single experts.

    `….experts.gate_up_proj` [experts, 2 · width, hidden] and `….experts.down_proj` [experts, hidden, width] are seen
    as `….experts.{number}.gate_proj.weight` and so on.
    """

    _STACKED = re.compile(r"^(.+\.experts\.)(gate_up|down)_proj$")
    _SINGLE = re.compile(r"^(.+\.experts\.)(\d+)\.(gate|up|down)_proj\.weight$")

    def __init__(self, inner: Checkpoint) -> None:
        self._inner = inner

    @classmethod
    def has_any(cls, names: Iterable[str]) -> bool:
        """Whether a checkpoint with these names has any."""
        return any(cls._STACKED.match(name) for name in names)

    def contents(self) -> dict[str, StoredTensor]:
        """The inner contents, with every expert on its own."""
        contents: dict[str, StoredTensor] = {}
        for name, stored in self._inner.contents().items():
            stacked = self._STACKED.match(name)
            if stacked is None or len(stored.shape) != 3:
                contents[name] = stored
                continue
            count, rows, columns = stored.shape
            parts = ("gate", "up") if stacked[2] == "gate_up" else ("down",)
            for number in range(count):
                for part in parts:
                    single = f"{stacked[1]}{number}.{part}_proj.weight"
                    contents[single] = StoredTensor((rows // len(parts), columns), stored.dtype)
        return contents

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        """Read a single expert's part of the stack."""
        single = self._SINGLE.match(name)
        if single is None:
            self._inner.read(name, out, start)
            return
        stack = f"{single[1]}{'down' if single[3] == 'down' else 'gate_up'}_proj"
        row, column = start or (0, 0)
        if single[3] == "up":
            row += self._inner.contents()[stack].shape[1] // 2
        self._inner.read(stack, out.unsqueeze(0), (int(single[2]), row, column))

    def close(self) -> None:
        """Close the inner checkpoint."""
        self._inner.close()


_STACKED = re.compile(r"^(.+\.experts\.)(gate_up|down)_proj_(blocks|scales)$")
_SINGLE = re.compile(r"^(.+\.experts\.)(\d+)\.(gate|up|down)_proj\.(blocks|scales)$")
_PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}
_DIMENSIONS = {"blocks": 4, "scales": 3}


class StackedBlocks:
    """A checkpoint with mxfp4 experts as gpt-oss has them, under the names of single experts.

    `….experts.gate_up_proj_blocks` [experts, 2 · width, hidden / 32, 16], whose rows are gates and ups in turn, and
    `….experts.down_proj_blocks` [experts, hidden, width / 32, 16] are seen as `….experts.{number}.gate_proj.blocks`
    [width, hidden / 2] and so on; `_scales`, without the last dimension, as `.scales`.
    """

    def __init__(self, inner: Checkpoint) -> None:
        self._inner = inner

    @classmethod
    def has_any(cls, names: Iterable[str]) -> bool:
        """Whether a checkpoint with these names has any."""
        return any(_STACKED.match(name) for name in names)

    def contents(self) -> dict[str, StoredTensor]:
        """The inner contents, with every expert on its own."""
        contents: dict[str, StoredTensor] = {}
        for name, stored in self._inner.contents().items():
            stacked = _STACKED.match(name)
            if stacked is None or len(stored.shape) != _DIMENSIONS[stacked[3]]:
                contents[name] = stored
                continue
            count, rows, groups, *block = stored.shape
            parts = _PARTS[stacked[2]]
            shape = (rows // len(parts), groups * block[0] if block else groups)
            for number in range(count):
                for part in parts:
                    contents[f"{stacked[1]}{number}.{part}_proj.{stacked[3]}"] = StoredTensor(shape, stored.dtype)
        return contents

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        """Read a single expert's part of the stack."""
        single = _SINGLE.match(name)
        if single is None:
            self._inner.read(name, out, start)
            return
        rows, columns = out.shape
        row, column = start or (0, 0)
        stack = f"{single[1]}{'down' if single[3] == 'down' else 'gate_up'}_proj_{single[4]}"
        block = self._inner.contents()[stack].shape[3:]
        each = block[0] if block else 1
        ways = 1 if single[3] == "down" else 2
        whole = out.new_empty((1, ways * rows, columns // each, *block))
        self._inner.read(stack, whole, (int(single[2]), ways * row, column // each, *(0 for _ in block)))
        out.copy_(whole[0, int(single[3] == "up") :: ways].flatten(1))

    def close(self) -> None:
        """Close the inner checkpoint."""
        self._inner.close()
