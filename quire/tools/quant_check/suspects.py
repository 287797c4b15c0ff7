"""Which layers can be swapped for their quantized ones alone, and how wrong each one's products are.

Some tools move scales from a weight into its neighbours before they quantize (AWQ and SmoothQuant: into the norm
before; others rotate the whole stream). Alone, such a layer computes something else, so it is swapped together with its
neighbours, or not at all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from quire.tools.quant_check.layer_pairs import LayerPair

SAME_NORM = 0.02
"""Relative error up to which a norm counts as unchanged: it may be stored in another dtype."""
SAME_EMBEDDING = 0.5
"""Relative error up to which an embedding counts as unchanged: it may be quantized."""
_BLOCK = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True)
class Suspect:
    """Layers that are swapped together.

    Attributes:
        name: The name of the layer's modules, or of a block.
        errors: By module, as from LayerPair.errors; empty for a block, whose parts only make sense together.
    """

    name: str
    errors: dict[str, float]
    pairs: tuple[LayerPair, ...]

    @property
    def error(self) -> float | None:
        """The error of the worst module; None if there are no errors by module."""
        return max(self.errors.values(), key=_size, default=None)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Within this context the base model computes with the quantized layers."""
        for pair in self.pairs:
            pair.mode = "quantized"
        try:
            yield
        finally:
            for pair in self.pairs:
                pair.mode = "base"


@dataclass(frozen=True)
class Suspects:
    """All layers that differ.

    Attributes:
        single: Layers that can be swapped alone, the worst first.
        together: Blocks that can only be swapped as a whole, in the model's order.
        note: Why not all layers are single; None if they are.
    """

    single: tuple[Suspect, ...]
    together: tuple[Suspect, ...]
    note: str | None = None


def find_suspects(pairs: Sequence[LayerPair]) -> Suspects:
    """Find the layers that differ, after all were compared on the base model's activations."""
    errors = {pair: pair.errors() for pair in pairs}
    worst = {pair: max(map(_size, found.values()), default=0.0) for pair, found in errors.items()}
    if any(pair.kind == "embedding" and worst[pair] > SAME_EMBEDDING for pair in pairs):
        return Suspects(
            (), (), "the embeddings differ, as after a rotation of the stream: no layer can be swapped alone"
        )
    scaled = {_block(pair) for pair in pairs if pair.kind == "norm" and worst[pair] > SAME_NORM}
    different = [pair for pair in pairs if pair.kind != "norm" and worst[pair] > 0]
    single = [Suspect(p.name, errors[p], (p,)) for p in different if _block(p) not in scaled]
    single.sort(key=lambda suspect: -_size(suspect.error or 0.0))
    blocks = [block for block in dict.fromkeys(map(_block, pairs)) if block in scaled]
    together = tuple(Suspect(block, {}, tuple(p for p in pairs if _block(p) == block)) for block in blocks)
    note = None
    if together:
        note = f"norms of {len(together)} blocks differ, as after AWQ or SmoothQuant: these blocks are swapped whole"
    return Suspects(tuple(single), together, note)


def _block(pair: LayerPair) -> str:
    """The block of a pair. An embedding is a block of its own, and so is everything after the last block."""
    found = _BLOCK.match(pair.modules[0])
    return found[1] if found else "embedding" if pair.kind == "embedding" else "head"


def _size(error: float) -> float:
    """An error to compare by: one that is not a number counts as the largest."""
    return math.inf if math.isnan(error) else error
