"""A GGUF file's header: metadata, and where each tensor lies.

A file may be hostile: every count, length, offset and type is checked against the file's size before anything is
allocated for it. Source: ggml's docs/gguf.md (versions 2 and 3, little endian). Imports no torch.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.compute.gguf.tensor_types import NOT_SERVED, TYPES, TensorType
from quire.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
_ALIGNMENT = "general.alignment"
_LARGEST_ALIGNMENT = 1 << 20
_LARGEST_DIMENSION = 1 << 40
_LARGEST_HEADER = 1 << 30
"""The maximum bytes of a header; the largest vocabularies take some 20 MB."""
_MAX_ELEMENTS = 1 << 23
"""The maximum number of elements of all arrays and tensors; a Python value takes some 60 bytes."""
_DEEPEST = 2
"""The maximum nesting of arrays, which no tool writes."""
_AT_ONCE = 1 << 22
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
"""How struct reads values, by the number of their type."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LEAST_BYTES = {_BOOL: 1, _STRING: 8, _ARRAY: 12} | {kind: struct.calcsize(code) for kind, code in _NUMBERS.items()}
_LEAST_ENTRY_BYTES = 8 + 4 + 1
"""The minimum bytes of a key and its value."""
_LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8
_ADVICE = "download it again"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        shape: The sizes as torch orders them, rows and columns last (a file lists them the other way round).
        offset: The offset of its first byte in the file.
    """

    shape: tuple[int, ...]
    form: TensorType
    offset: int
    path: Path

    @property
    def rows(self) -> int:
        """The product of all sizes but the last."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """The bytes of a row, which has the last size."""
        return self.shape[-1] // self.form.block * self.form.block_bytes

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def equals(self, other: GgufTensor) -> bool:
        if (self.form, self.shape) != (other.form, other.shape):
            return False
        return have_equal_bytes(self.path, self.offset, other.path, other.offset, self.nbytes)


@dataclass(frozen=True)
class GgufModel:
    """What the files of a model say before their tensors' data.

    Attributes:
        paths: The files, in order.
        metadata: Numbers, booleans, strings and lists of them, by key, of the first file.
        tensors: The tensors of all files, by name.
    """

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufModel:
    """Read one file's header. Raises CheckpointError if the file is no GGUF file, is broken or cut short, or has
    tensors of a type that is not served."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).header()
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{path} cannot be read as a GGUF file ({error}): {_ADVICE}.") from None


class _Parser:
    """Reads a file from the front; `_at` is never beyond `_end`."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._end = min(self._size, _LARGEST_HEADER)
        self._at = 0
        self._elements = 0

    def header(self) -> GgufModel:
        if self._take(4) != MAGIC:
            raise self._broken("does not begin with GGUF: it is another format")
        version = self._number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big") in VERSIONS
            what = "is big-endian" if swapped else f"has version {version}"
            raise CheckpointError(f"{self._path} {what}, which is not supported: served are versions 2 and 3.")
        tensors, entries = int(self._number("Q")), int(self._number("Q"))
        self._check_count(entries, _LEAST_ENTRY_BYTES, "entries of metadata")
        self._check_count(tensors, _LEAST_TENSOR_BYTES, "tensors")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string("a key")
            if key in metadata or not key:
                raise self._broken(f"has '{key}' twice" if key else "has a key without a name")
            metadata[key] = self._value(int(self._number("I")), key, 0)
        return GgufModel((self._path,), metadata, self._tensors(tensors, self._alignment(metadata)))

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get(_ALIGNMENT, DEFAULT_ALIGNMENT)
        is_whole = isinstance(alignment, int) and not isinstance(alignment, bool)
        if not is_whole or not 0 < alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
            raise self._broken(f"has {_ALIGNMENT} {alignment!r}, which is no power of two")
        return int(alignment)

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        declared = [self._tensor() for _ in range(count)]
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, form, offset in declared:
            tensor = GgufTensor(shape, form, begin + offset, self._path)
            if name in tensors:
                raise self._broken(f"has the tensor '{name}' twice")
            if offset % alignment:
                raise self._broken(f"'{name}' begins at {offset}, which is no multiple of {alignment}")
            if tensor.offset + tensor.nbytes > self._size:
                raise self._broken(
                    f"is cut short: '{name}' ends at byte {tensor.offset + tensor.nbytes:,} of {self._size:,}"
                )
            tensors[name] = tensor
        self._check_overlap(tensors)
        return tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], TensorType, int]:
        name = self._string("a tensor's name")
        dimensions = int(self._number("I"))
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._broken(f"'{name}' has {dimensions} dimensions")
        sizes = [int(self._number("Q")) for _ in range(dimensions)]
        kind, offset = int(self._number("I")), int(self._number("Q"))
        form = TYPES.get(kind)
        if form is None:
            known = NOT_SERVED.get(kind, f"number {kind}")
            served = ", ".join(each.name for each in TYPES.values())
            raise CheckpointError(
                f"{self._path}: '{name}' has the type {known}, which is not supported: served are {served}. Use "
                "another file of the same model, such as its Q4_K_M or Q8_0."
            )
        if not all(0 < size <= _LARGEST_DIMENSION for size in sizes):
            raise self._broken(f"'{name}' has the sizes {sizes}")
        if sizes[0] % form.block:
            raise self._broken(f"'{name}' has rows of {sizes[0]}, which are no whole blocks of {form.name}")
        return name, tuple(reversed(sizes)), form, offset

    def _check_overlap(self, tensors: Mapping[str, GgufTensor]) -> None:
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset < end:
                raise self._broken(f"'{name}' overlaps the tensor before it")
            end = tensor.offset + tensor.nbytes

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _BOOL:
            return self._boolean(key)
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY or depth >= _DEEPEST:
            raise self._broken(f"'{key}' has a value of the unknown type {kind}")
        return self._array(key, depth)

    def _array(self, key: str, depth: int) -> list[Any]:
        kind, count = int(self._number("I")), int(self._number("Q"))
        if kind not in _LEAST_BYTES:
            raise self._broken(f"'{key}' is an array of the unknown type {kind}")
        self._check_count(count, _LEAST_BYTES[kind], f"elements of '{key}'")
        if kind in _NUMBERS:
            code = f"<{count}{_NUMBERS[kind]}"
            return list(struct.unpack(code, self._take(struct.calcsize(code))))
        if kind == _STRING:
            return self._strings(count, key)
        return [self._value(kind, key, depth + 1) for _ in range(count)]

    def _strings(self, count: int, key: str) -> list[str]:
        """Read strings as `_string` does, but fast: vocabularies have some 500,000."""
        data, at, end, values = self._data, self._at, self._end, []
        for _ in range(count):
            begin = at + 8
            at = begin + int.from_bytes(data[at:begin], "little")
            if at > end:
                raise self._broken(f"is cut short in '{key}'")
            values.append(data[begin:at].decode("utf-8", errors="replace"))
        self._at = at
        return values

    def _boolean(self, key: str) -> bool:
        byte = self._take(1)[0]
        if byte > 1:
            raise self._broken(f"'{key}' is a boolean of {byte}")
        return bool(byte)

    def _string(self, what: str) -> str:
        length = int(self._number("Q"))
        if length > self._end - self._at:
            raise self._broken(f"is cut short: {what} has {length:,} bytes")
        # Some vocabularies have halves of characters; such tokens are compared with nothing.
        return self._take(length).decode("utf-8", errors="replace")

    def _number(self, code: str) -> int | float:
        value: int | float = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]
        return value

    def _take(self, count: int) -> bytes:
        if count > self._end - self._at:
            raise self._broken(f"is cut short: its header goes on at byte {self._end:,}")
        self._at += count
        return self._data[self._at - count : self._at]

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        self._elements += count
        if count > (self._end - self._at) // least_bytes or self._elements > _MAX_ELEMENTS:
            raise self._broken(f"is cut short: it declares {count:,} {what}")

    def _broken(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self._path} {text}: {_ADVICE}.")


def have_equal_bytes(one: Path, at: int, other: Path, other_at: int, size: int) -> bool:
    """Whether `size` bytes of two files from these offsets on are equal; reads no further than the first difference."""
    with one.open("rb") as first, other.open("rb") as second:
        first.seek(at)
        second.seek(other_at)
        while size:
            part = first.read(min(size, _AT_ONCE))
            if not part or part != second.read(len(part)):
                return False
            size -= len(part)
    return True
