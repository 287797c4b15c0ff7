"""Checkpoints whose experts lie in one tensor a layer, under the names of single experts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.models.weights.checkpoint import Checkpoint, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

_STACKED = re.compile(r"^(.+\.experts\.)(gate_up|down)_proj(?:_(blocks|scales))?$")
_SINGLE = re.compile(r"^(.+\.experts\.)(\d+)\.(gate|up|down)_proj\.(weight|blocks|scales)$")
_PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}
_DIMENSIONS = {"weight": 3, "blocks": 4, "scales": 3}


def unstacked(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, with experts that are stacked under the names of single ones."""
    stacks = {}
    for name, stored in checkpoint.contents().items():
        found = _STACKED.match(name)
        if found is not None and len(stored.shape) == _DIMENSIONS[found[3] or "weight"]:
            stacks[name] = stored
    return UnstackedExperts(checkpoint, stacks) if stacks else checkpoint


class UnstackedExperts:
    """A checkpoint whose experts are stacked, under the names of single experts.

    As transformers 5 holds them, `….experts.gate_up_proj` [experts, 2 · width, hidden] and `….experts.down_proj`
    [experts, hidden, width] are seen as `….experts.{number}.gate_proj.weight` and so on.

    As gpt-oss has those of mxfp4, `….experts.gate_up_proj_blocks` [experts, 2 · width, hidden / 32, 16], whose rows are
    gates and ups in turn, and `….experts.down_proj_blocks` [experts, hidden, width / 32, 16] are seen as
    `….experts.{number}.gate_proj.blocks` [width, hidden / 2] and so on; `_scales`, without the last dimension, as
    `.scales`.

    Args:
        inner: The checkpoint.
        stacks: Its stacks, by name.
    """

    def __init__(self, inner: Checkpoint, stacks: dict[str, StoredTensor]) -> None:
        self._inner = inner
        self._stacks = stacks

    def contents(self) -> dict[str, StoredTensor]:
        """The inner contents, with every expert on its own."""
        contents: dict[str, StoredTensor] = {}
        for name, stored in self._inner.contents().items():
            found = _STACKED.match(name)
            if found is None or name not in self._stacks:
                contents[name] = stored
                continue
            count, rows, columns, *block = stored.shape
            parts = _PARTS[found[2]]
            shape = (rows // len(parts), columns * block[0] if block else columns)
            for number in range(count):
                for part in parts:
                    single = f"{found[1]}{number}.{part}_proj.{found[3] or 'weight'}"
                    contents[single] = StoredTensor(shape, stored.dtype)
        return contents

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        """Read a single expert's part of the stack."""
        single = _SINGLE.match(name)
        if single is None:
            self._inner.read(name, out, start)
            return
        layer, number, part, kind = single.groups()
        stack = f"{layer}{'down' if part == 'down' else 'gate_up'}_proj{'' if kind == 'weight' else f'_{kind}'}"
        shape = self._stacks[stack].shape
        row, column = start or (0, 0)
        if kind == "weight":  # all gates, then all ups
            first = shape[1] // 2 if part == "up" else 0
            self._inner.read(stack, out.unsqueeze(0), (int(number), first + row, column))
            return
        (rows, columns), block = out.shape, shape[3:]
        each = block[0] if block else 1
        ways = 1 if part == "down" else 2
        whole = out.new_empty((1, ways * rows, columns // each, *block))
        self._inner.read(stack, whole, (int(number), ways * row, column // each, *(0 for _ in block)))
        out.copy_(whole[0, int(part == "up") :: ways].flatten(1))

    def close(self) -> None:
        """Close the inner checkpoint."""
        self._inner.close()
