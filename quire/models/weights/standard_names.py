"""A checkpoint under the names that models use, whichever of the published customs its files follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quire.models.weights.checkpoint import Checkpoint, StoredTensor
from quire.models.weights.headers import text_name
from quire.models.weights.stacked_experts import unstacked
from quire.models.weights.tied_head import HEAD

if TYPE_CHECKING:
    from torch import Tensor

_BARE = {"embed_tokens.weight": "model.", "wte.weight": "transformer."}
"""By a name that a bare decoder's checkpoint has, the prefix that its names lack."""
_EMBEDDING, _GPT2_EMBEDDING = (prefix + bare for bare, prefix in _BARE.items())


def with_standard_names(checkpoint: Checkpoint, *, tied: bool = False) -> Checkpoint:
    """The checkpoint under the names that models use, whichever of the published customs its files follow.

    Args:
        tied: The model's head is its embedding, of which the files may have either.
    """
    names = checkpoint.contents()
    texts = {text: name for name in names if (text := text_name(name)) is not None}
    if any(text != name for text, name in texts.items()) or len(texts) < len(names):
        checkpoint = Renamed(checkpoint, texts)
        names = checkpoint.contents()
    for bare, prefix in _BARE.items():
        if bare in names and prefix + bare not in names:
            outer = {name if name.startswith("lm_head.") else prefix + name: name for name in names}
            checkpoint = Renamed(checkpoint, outer)  # one of the bare decoder, saved without the prefix
    names = checkpoint.contents()
    embedding = _GPT2_EMBEDDING if any(name.startswith("transformer.") for name in names) else _EMBEDDING
    if tied and embedding not in names and HEAD in names:
        checkpoint = Renamed(checkpoint, {name: name for name in names if name != HEAD} | {embedding: HEAD})
    return unstacked(checkpoint)


class Renamed:
    """Some of a checkpoint's tensors under other names.

    Args:
        inner: The checkpoint.
        names: The names in it, by the new ones.
    """

    def __init__(self, inner: Checkpoint, names: Mapping[str, str]) -> None:
        self._inner = inner
        self._names = names

    def contents(self) -> dict[str, StoredTensor]:
        """What is named."""
        stored = self._inner.contents()
        return {name: stored[inner] for name, inner in self._names.items()}

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        """Read from the inner checkpoint."""
        self._inner.read(self._names[name], out, start)

    def close(self) -> None:
        """Close the inner checkpoint."""
        self._inner.close()
