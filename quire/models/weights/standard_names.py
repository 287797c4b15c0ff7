"""A checkpoint under the names that models use, whichever of the published customs its files follow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from quire.errors import CheckpointError
from quire.models.weights.checkpoint import Checkpoint, StoredTensor, WrappedCheckpoint
from quire.models.weights.safetensors_files import HEAD, text_name

if TYPE_CHECKING:
    from torch import Tensor

_BARE = {"embed_tokens.weight": "model.", "wte.weight": "transformer."}
"""By a name that a bare decoder's checkpoint has, the prefix that its names lack."""
_EMBEDDING, _GPT2_EMBEDDING = (prefix + bare for bare, prefix in _BARE.items())
_STACKED = re.compile(r"^(.+\.experts\.)(gate_up|down)_proj(?:_(blocks|scales))?$")
_SINGLE = re.compile(r"^(.+\.experts\.)(\d+)\.(gate|up|down)_proj\.(weight|blocks|scales)$")
_PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}
_DIMENSIONS = {"weight": 3, "blocks": 4, "scales": 3}
FUSION = "fc"
"""The product that makes one state of a model's streams. It is computed with the model, all else with the head."""
_NOT_READ = ("t2d",)
"""A mask of the tokens that d2t names, which is checked."""


def with_standard_names(checkpoint: Checkpoint, *, tied: bool = False) -> Checkpoint:
    """Return the checkpoint under the names that models use, whichever of the published customs its files follow. If
    weights are `tied`, the head is the embedding, of which the files may have either."""
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


class Renamed(WrappedCheckpoint):
    """Some of a checkpoint's tensors under other names; `names` has the checkpoint's names by the new ones."""

    def __init__(self, inner: Checkpoint, names: Mapping[str, str]) -> None:
        super().__init__(inner)
        self._names = names

    def contents(self) -> dict[str, StoredTensor]:
        stored = super().contents()
        return {name: stored[inner] for name, inner in self._names.items()}

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        super().read(self._names[name], out, start)


def unstacked(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, with experts that are stacked under the names of single ones."""
    stacks = {}
    for name, stored in checkpoint.contents().items():
        found = _STACKED.match(name)
        if found is not None and len(stored.shape) == _DIMENSIONS[found[3] or "weight"]:
            stacks[name] = stored
    return UnstackedExperts(checkpoint, stacks) if stacks else checkpoint


class UnstackedExperts(WrappedCheckpoint):
    """A checkpoint whose experts are stacked, under the names of single experts; `stacks` are the stacks by name.

    transformers 5 stacks them as `….experts.gate_up_proj` [experts, 2 · width, hidden] and `….experts.down_proj`
    [experts, hidden, width]. These become `….experts.{number}.gate_proj.weight` and so on.

    gpt-oss stacks mxfp4 as `….experts.gate_up_proj_blocks` [experts, 2 · width, hidden / 32, 16], whose rows are gates
    and ups in turn, and `….experts.down_proj_blocks` [experts, hidden, width / 32, 16]. These become
    `….experts.{number}.gate_proj.blocks` [width, hidden / 2] and so on; `_scales`, which lack the last dimension,
    become `.scales`.
    """

    def __init__(self, inner: Checkpoint, stacks: dict[str, StoredTensor]) -> None:
        super().__init__(inner)
        self._stacks = stacks

    def contents(self) -> dict[str, StoredTensor]:
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


def head_part(checkpoint: Checkpoint, fusion: bool) -> Checkpoint:
    """FUSION, or everything else, of a head's checkpoint under standard names.

    vLLM's heads have `layers.0` where the heads of EAGLE's authors, and Quire, have `midlayer`. Raises CheckpointError
    if the checkpoint's two lists of known tokens differ.
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
