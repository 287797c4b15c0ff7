"""A checkpoint under the names that models use, whichever of the published customs its files follow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

import torch

from quire.errors import CheckpointError
from quire.models.weights.checkpoint import Checkpoint, StoredTensor, WrappedCheckpoint
from quire.models.weights.safetensors_files import HEAD, is_of_layer, text_name

if TYPE_CHECKING:
    from torch import Tensor

_BARE = {"embed_tokens.weight": "model.", "wte.weight": "transformer."}
"""By a name that a bare decoder's checkpoint has, the prefix that its names lack."""
_EMBEDDING, _GPT2_EMBEDDING = (prefix + bare for bare, prefix in _BARE.items())
_STACKED = re.compile(r"^(.+\.experts\.)(gate_up|gate|up|down)_proj(?:_(blocks|scales|bias))?$")
_PARTS = {"gate_up": ("gate", "up"), "gate": ("gate",), "up": ("up",), "down": ("down",)}
_ALL_PARTS = ("gate", "up", "down")
_DIMENSIONS = {"weight": 3, "blocks": 4, "scales": 3, "bias": 2}
_RENAMED = (
    (re.compile(r"\.block_sparse_moe\.input_linear\.weight$"), ".block_sparse_moe.experts.gate_up_proj"),
    (re.compile(r"\.block_sparse_moe\.output_linear\.weight$"), ".block_sparse_moe.experts.down_proj"),
    (re.compile(r"\.block_sparse_moe\.router\.layer\.weight$"), ".block_sparse_moe.router.weight"),
)
"""Names of published checkpoints, and transformers' present ones."""
FUSION = "fc"
"""The product that makes one state of a model's streams. It is computed with the model, all else with the head."""
_NOT_READ = ("t2d",)
"""A mask of the tokens that d2t names, which is checked."""


def with_standard_names(
    checkpoint: Checkpoint,
    *,
    tied: bool = False,
    left_out: range = range(0),
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    transposed_experts: bool = False,
    older: Sequence[tuple[str, str]] = (),
    others: Sequence[tuple[str, str]] = (),
    unread: tuple[str, ...] = (),
    unbiased: tuple[str, ...] = (),
    joined: Sequence[tuple[str, tuple[str, ...]]] = (),
) -> Checkpoint:
    """The checkpoint under the names that models use, whichever of the published customs its files follow.

    Args:
        checkpoint: The files.
        tied: The model's head is its embedding, of which the files may have either.
        left_out: The numbers of layers that no model reads.
        expert: The model's names of gate, up and down of one expert.
        transposed_experts: Whether experts that are stacked are stored as [in, out].
        others: Parts of other names, and the model's in their place.
        older: Beginnings of names in some files, each with what it stands for.
        unread: Beginnings of names, as the model has them, of tensors that it does not read.
        unbiased: Ends of names of modules that have no bias where the model has one.
        joined: Ends of names of tensors that some files have in parts, each with those of the parts.
    """
    for begin, standard in older:
        names = checkpoint.contents()
        if any(name.startswith(begin) for name in names):
            renamed = {standard + name.removeprefix(begin) if name.startswith(begin) else name: name for name in names}
            checkpoint = Renamed(checkpoint, renamed)
    names = checkpoint.contents()
    texts = {
        own: name
        for name in names
        if (text := text_name(name)) is not None
        and not is_of_layer(text, left_out)
        and not (own := _renamed(text, others)).startswith(unread)
    }
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
    if unbiased:
        checkpoint = WithZeroBiases(checkpoint, unbiased)
    return unstacked(_with_joined(checkpoint, joined), expert, transposed=transposed_experts)


def _with_joined(checkpoint: Checkpoint, joined: Sequence[tuple[str, tuple[str, ...]]]) -> Checkpoint:
    parts = {
        name.removesuffix(ends[0]) + whole: tuple(name.removesuffix(ends[0]) + end for end in ends)
        for whole, ends in joined
        for name in checkpoint.contents()
        if name.endswith(ends[0])
    }
    return JoinedRows(checkpoint, parts) if parts else checkpoint


def _renamed(name: str, others: Sequence[tuple[str, str]]) -> str:
    for pattern, new in _RENAMED:
        name = pattern.sub(new, name)
    for old, new in others:
        name = name.replace(old, new)
    return name


def tower_part(checkpoint: Checkpoint, needed: Set[str]) -> Checkpoint:
    """The tensors of a tower for images, of which each generation of transformers writes the names in another way:
    `model.vision_tower.…`, `vision_tower.vision_model.…`. Layers that no image needs (`needed`) are left out."""
    names = {name.removeprefix("model.").replace(".vision_model.", ".", 1): name for name in checkpoint.contents()}
    return Renamed(checkpoint, {name: names[name] for name in names.keys() & needed})


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


class WithZeroBiases(WrappedCheckpoint):
    """A checkpoint with zeros as the biases of modules that have none; `unbiased` are ends of their names."""

    def __init__(self, inner: Checkpoint, unbiased: tuple[str, ...]) -> None:
        super().__init__(inner)
        stored, ends = inner.contents(), tuple(f"{name}.weight" for name in unbiased)
        self._zeros = {
            bias: StoredTensor(each.shape[:1], each.dtype)
            for name, each in stored.items()
            if name.endswith(ends) and (bias := f"{name.removesuffix('.weight')}.bias") not in stored
        }

    def contents(self) -> dict[str, StoredTensor]:
        return super().contents() | self._zeros

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        if name in self._zeros:
            out.zero_()
        else:
            super().read(name, out, start)


class JoinedRows(WrappedCheckpoint):
    """A checkpoint, with tensors as one whose rows lie in several; `parts` are the names of these, by the whole's."""

    def __init__(self, inner: Checkpoint, parts: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__(inner)
        self._parts = parts
        self._stored = inner.contents()

    def contents(self) -> dict[str, StoredTensor]:
        single = {part for parts in self._parts.values() for part in parts}
        contents = {name: stored for name, stored in self._stored.items() if name not in single}
        for name, parts in self._parts.items():
            own = [self._stored[part] for part in parts if part in self._stored]
            contents[name] = StoredTensor((sum(part.shape[0] for part in own), *own[0].shape[1:]), own[0].dtype)
        return contents

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        if name not in self._parts:
            self._inner.read(name, out, start)
            return
        (first, *rest), begin = start or [0] * out.dim(), 0
        for part in self._parts[name]:
            rows = self._stored[part].shape[0]
            own = range(max(first, begin), min(first + len(out), begin + rows))
            if own:
                self._inner.read(part, out[own.start - first : own.stop - first], (own.start - begin, *rest))
            begin += rows


def unstacked(checkpoint: Checkpoint, expert: tuple[str, str, str], *, transposed: bool = False) -> Checkpoint:
    """The checkpoint, with experts that are stacked under the names of single ones.

    Args:
        checkpoint: The files.
        expert: The names of gate, up and down of one expert.
        transposed: Whether stacks of weights are stored as [experts, in, out].
    """
    stacks = {}
    for name, stored in checkpoint.contents().items():
        found = _STACKED.match(name)
        if found is not None and len(stored.shape) == _DIMENSIONS[found[3] or "weight"]:
            stacks[name] = stored
    return UnstackedExperts(checkpoint, stacks, expert, transposed=transposed) if stacks else checkpoint


class _Single(NamedTuple):
    """Where a tensor of one expert is: in which stack, the expert's number, gate, up or down, the kind, and how many
    such parts the stack has of each expert.
    """

    stack: str
    number: int
    part: str
    kind: str
    parts: int


class UnstackedExperts(WrappedCheckpoint):
    """A checkpoint whose experts are stacked, under the names of single experts; `stacks` are the stacks by name.

    transformers 5 stacks them as `….experts.gate_up_proj` [experts, 2 · width, hidden] and `….experts.down_proj`
    [experts, hidden, width]. These become `….experts.{number}.gate_proj.weight` and so on. Llama 4's are transposed:
    [experts, hidden, 2 · width] and [experts, width, hidden].

    gpt-oss stacks mxfp4 as `….experts.gate_up_proj_blocks` [experts, 2 · width, hidden / 32, 16], whose rows are gates
    and ups in turn, and `….experts.down_proj_blocks` [experts, hidden, width / 32, 16]. These become
    `….experts.{number}.gate_proj.blocks` [width, hidden / 2] and so on; `_scales`, which lack the last dimension,
    become `.scales`, and `….experts.gate_up_proj_bias` [experts, 2 · width], in turn too, becomes `.bias`. Its weights
    in other dtypes are transposed, with gates and ups in turn: that there is a bias tells them from Llama 4's.
    """

    def __init__(
        self,
        inner: Checkpoint,
        stacks: dict[str, StoredTensor],
        expert: tuple[str, str, str],
        *,
        transposed: bool = False,
    ) -> None:
        super().__init__(inner)
        self._stacks = stacks
        self._transposed = transposed
        self._singles: dict[str, _Single] = {}
        for name, stored in stacks.items():
            found = _STACKED.match(name)
            assert found is not None
            for number in range(stored.shape[0]):
                for part in _PARTS[found[2]]:
                    projection, kind = expert[_ALL_PARTS.index(part)], found[3] or "weight"
                    self._singles[f"{found[1]}{number}.{projection}.{kind}"] = _Single(
                        name, number, part, kind, len(_PARTS[found[2]])
                    )

    def contents(self) -> dict[str, StoredTensor]:
        contents = {name: stored for name, stored in self._inner.contents().items() if name not in self._stacks}
        for name, single in self._singles.items():
            stored = self._stacks[single.stack]
            rows, *columns = stored.shape[1:3]
            if self._transposed and single.kind == "weight":
                rows, columns = columns[0], [rows]
            block = stored.shape[3:]
            rows //= single.parts
            contents[name] = StoredTensor((rows, *(n * block[0] if block else n for n in columns)), stored.dtype)
        return contents

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        single = self._singles.get(name)
        if single is None:
            self._inner.read(name, out, start)
            return
        begin = tuple(start or [0] * out.dim())
        if single.kind != "weight" or f"{single.stack}_bias" in self._stacks:
            self._read_turns(single, out, begin)
            return
        stack, number, part, _, parts = single  # all gates, then all ups
        row, column = begin
        row += self._stacks[stack].shape[2 if self._transposed else 1] // 2 if part == "up" and parts == 2 else 0
        if self._transposed:
            columns = out.new_empty((1, *out.shape[::-1]))
            self._inner.read(stack, columns, (number, column, row))
            out.copy_(columns[0].T)
        else:
            self._inner.read(stack, out.unsqueeze(0), (number, row, column))

    def _read_turns(self, single: _Single, out: Tensor, begin: Sequence[int]) -> None:
        """Read rows of a stack with gates and ups in turn."""
        block, ways = self._stacks[single.stack].shape[3:], single.parts
        each = block[0] if block else 1
        shape = [ways * out.shape[0], *(size // each for size in out.shape[1:])]
        window = [ways * begin[0], *(column // each for column in begin[1:])]
        is_transposed = self._transposed and single.kind == "weight"
        if is_transposed:
            shape, window = shape[::-1], window[::-1]
        whole = out.new_empty((1, *shape, *block))
        self._inner.read(single.stack, whole, (single.number, *window, *(0 for _ in block)))
        rows = (whole[0].T if is_transposed else whole[0])[int(single.part == "up" and ways == 2) :: ways]
        out.copy_(rows.flatten(1) if block else rows)


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
