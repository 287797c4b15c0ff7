"""The safetensors files of a directory, and what their headers say: names, dtypes and shapes. Imports no torch.

Models that also read images or sounds wrap a text model, and each generation of transformers has other prefixes for
its names; `text_name` removes them. A checkpoint that ties its head to the embedding may have another head
nevertheless: fine-tunes are published with `tie_word_embeddings` of their base model and a head of their own. As in
transformers 5, two tensors of different values are not one, whatever config.json says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.compute.gguf.header import have_equal_bytes
from quire.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5")
_LENGTH_BYTES = 8
_TEXT = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")
_HEAD = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(lm_head(?:\..+)?)$")
_OTHERS = re.compile(
    r"^(?:model\.)?(?:vision_tower|vision_model|visual|audio_tower|multi_modal_projector|multimodal_projector|mm_projector|vit_large_projector"
    r"|connector|vision_encoder|vision_embedder|vision_projection|image_tower|video_tower|projector|visual_embeddings_table|image_newline|embed_vision|embed_audio|mtp(?:_\w+)?)(?:\.|$)"
)
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
HEAD = "lm_head.weight"
EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight", "wte.weight")
_MODULE = "lm_head."


def find_files(directory: Path) -> list[Path]:
    """The weight files of a checkpoint: those of the index, else model.safetensors, else every other one."""
    if (directory / INDEX).is_file():
        return _indexed(directory)
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    found = sorted(p for p in directory.glob("*.safetensors") if not p.name.startswith("consolidated"))
    if found:
        return found
    others = sorted(p.name for pattern in _OTHER_FORMATS for p in directory.glob(pattern))
    if others:
        raise CheckpointError(
            f"{directory} has its weights only as {others[0]}, a format that Quire does not read: use a checkpoint in "
            "safetensors, or convert it with transformers' save_pretrained."
        )
    raise CheckpointError(
        f"{directory} has no *.safetensors file: download the weights, or use --load-format dummy to measure without."
    )


def _indexed(directory: Path) -> list[Path]:
    index = directory / INDEX
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        plain = all(Path(name).name == name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} cannot be read ({error!r}): download it again.") from None
    if not plain or not names:
        raise CheckpointError(f"{index} must name files of its own directory: download it again.")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index} names {len(missing)} files that are not there ({', '.join(missing[:3])}): download them."
        )
    return [directory / name for name in names]


@dataclass(frozen=True)
class LocatedTensor:
    """A tensor of a file: `size` bytes from `offset` on. `dtype` is safetensors' name of it."""

    path: Path
    offset: int
    size: int
    dtype: str
    shape: tuple[int, ...]


def read_headers(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in a directory's files; empty if they cannot be read, which reading weights reports."""
    try:
        return {name: each.shape for name, each in located_tensors(sorted(directory.glob("*.safetensors")))}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def located_tensors(files: Sequence[Path]) -> Iterator[tuple[str, LocatedTensor]]:
    """Each tensor of the files, with its name. Raises OSError, ValueError, TypeError, KeyError or AttributeError if
    a file cannot be read, or has another format."""
    for path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > path.stat().st_size:
                raise ValueError("cut short")
            for name, entry in json.loads(file.read(length)).items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    offset = _LENGTH_BYTES + length + begin
                    yield name, LocatedTensor(path, offset, end - begin, entry["dtype"], tuple(entry["shape"]))


def text_name(name: str) -> str | None:
    """What the text model alone calls a tensor; None: it is of a part that reads something else."""
    if found := _HEAD.match(name):
        return found[1]
    if found := _TEXT.match(name):
        return f"model.{name[found.end() :]}"
    return None if _OTHERS.match(name) else name


def is_of_layer(name: str, layers: range) -> bool:
    """Whether a text model's tensor is of one of these layers."""
    return bool(layers) and (found := _LAYER.match(name)) is not None and int(found[1]) in layers


def has_own_head(directory: Path) -> bool:
    """Whether the files have a head of other values, shape or form than the embedding; false if they cannot be read,
    which reading the weights reports.
    """
    try:
        located = {text_name(name) or name: tensor for name, tensor in located_tensors(find_files(directory))}
    except (CheckpointError, OSError, ValueError, TypeError, KeyError, AttributeError, json.JSONDecodeError):
        return False
    embedding = next((located[name] for name in EMBEDDINGS if name in located), None)
    heads = [name for name in located if name.startswith(_MODULE)]
    if embedding is None or not heads:
        return False
    return heads != [HEAD] or not _are_equal(embedding, located[HEAD])


def _are_equal(one: LocatedTensor, other: LocatedTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return one.size == other.size and have_equal_bytes(one.path, one.offset, other.path, other.offset, one.size)
