"""A draft head's checkpoint under standard names, whichever of the published customs its files follow."""

from __future__ import annotations

import torch

from quire.errors import CheckpointError
from quire.models.weights.checkpoint import Checkpoint
from quire.models.weights.standard_names import Renamed

FUSION = "fc"
"""The product that makes one state of a model's streams. It is computed with the model, all else with the head."""
_NOT_READ = ("t2d",)
"""A mask of the tokens that d2t names, which is checked."""


def head_part(checkpoint: Checkpoint, fusion: bool) -> Checkpoint:
    """FUSION, or everything else, of a head's checkpoint under standard names.

    vLLM's heads have `layers.0` where the heads of EAGLE's authors, and Quire, have `midlayer`.

    Raises:
        CheckpointError: The checkpoint's two lists of known tokens differ.
    """
    names = {_standard(name): name for name in checkpoint.contents()}
    if not fusion and "t2d" in names and "d2t" in names:
        _check_known_tokens(checkpoint, names["t2d"], names["d2t"])
    return Renamed(
        checkpoint,
        {
            name: stored
            for name, stored in names.items()
            if name not in _NOT_READ and name.startswith(f"{FUSION}.") == fusion
        },
    )


def _check_known_tokens(checkpoint: Checkpoint, mask: str, offsets: str) -> None:
    """Check that the mask and the offsets name the same of the model's tokens."""
    stored = checkpoint.contents()
    types = {"BOOL": torch.bool, "U8": torch.uint8, "I64": torch.int64, "I32": torch.int32}
    if not {stored[mask].dtype, stored[offsets].dtype} <= types.keys():
        return  # no tool writes that: reading d2t says so
    known, added = (torch.empty(stored[name].shape, dtype=types[stored[name].dtype]) for name in (mask, offsets))
    checkpoint.read(mask, known)
    checkpoint.read(offsets, added)
    named = torch.arange(len(added)) + added
    in_range = bool(((named >= 0) & (named < len(known))).all())  # else reading d2t says so
    if in_range and not torch.equal(known.nonzero()[:, 0], named.sort().values):
        raise CheckpointError(f"{mask} and {offsets} name different tokens: download the head again.")


def _standard(name: str) -> str:
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name
