"""The headers of safetensors files: names, dtypes and shapes, without any values; and what a text model calls tensors.

Models that also read images or sounds wrap a text model, and each generation of transformers has other prefixes for
its names. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_LENGTH_BYTES = 8
_TEXT = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")
_HEAD = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(lm_head(?:\..+)?)$")
_OTHERS = re.compile(
    r"^(?:model\.)?(?:vision_tower|vision_model|visual|audio_tower|multi_modal_projector|multimodal_projector|mm_projector"
    r"|connector|image_newline)(?:\.|$)"
)


@dataclass(frozen=True)
class LocatedTensor:
    """A tensor of a file, `size` bytes from `offset` on; `dtype` in safetensors' words."""

    path: Path
    offset: int
    size: int
    dtype: str
    shape: tuple[int, ...]


def read_headers(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in the directory's files; none where these cannot be read, which reading weights will
    say.
    """
    try:
        return {name: tuple(shape) for name, _, shape in headers_of(sorted(directory.glob("*.safetensors")))}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def headers_of(files: Sequence[Path]) -> Iterator[tuple[str, str, list[int]]]:
    """Name, dtype and shape of each tensor.

    Raises:
        OSError, ValueError, TypeError, KeyError, AttributeError: A file cannot be read, or is none.
    """
    for name, tensor in located_tensors(files):
        yield name, tensor.dtype, list(tensor.shape)


def located_tensors(files: Sequence[Path]) -> Iterator[tuple[str, LocatedTensor]]:
    """Each tensor by its name. Raises what headers_of does."""
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
