"""Packed weights in a file that all processes map, so that a second start does not pack, and replicas share memory.

The file has the data, each at a multiple of PAGE, then an index in JSON, and last the index's hash and length. It is
written under another name and renamed when it is whole. A file whose length or index is wrong is written anew; data are
not hashed at each start, so bits that a disk has lost are not noticed.

Linux keeps what is written at once, or read for a mapping that asks for it, in a large page where the file system can;
weights in such pages are read a tenth faster.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from quire.compute.kernels.cpu.library import SUFFIXES, Library
from quire.compute.kernels.cpu.linear import PackedWeight
from quire.compute.kernels.reference.gguf_blocks import BlockWeight

P = TypeVar("P")
SUFFIX = ".packed"
PAGE = 4096
LARGE_PAGE = 1 << 21
_NAMES = SUFFIXES | {torch.uint8: "bytes"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_DIGEST_SIZE = hashlib.sha256().digest_size
_LENGTH_SIZE = 8
_log = logging.getLogger(__name__)


class PackedWeightFile:
    """The packed weights of one checkpoint, for one dtype and one layout; read, or written if there is no whole file.

    Where nothing can be written, weights are packed as if there were no file.

    Args:
        path: The file's path. Its name must change when its contents would.
        limit: Bytes that the files of the directory may take; the files that were unused for the longest time are
            removed.
        kernels: The library that reads the layout.
    """

    def __init__(self, path: Path, limit: int, kernels: Library) -> None:
        self._path = path
        self._limit = limit
        self._kernels = kernels
        self._mapping: mmap.mmap | None = None
        self._index: dict[str, Any] = {}
        self._writer: _Writer | None = None
        self._lacking: list[str] = []
        self._held = ExitStack()

    def __enter__(self) -> PackedWeightFile:
        if not self._read():
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._lock()
                if not self._read():  # another process may have written it meanwhile
                    self._writer = _Writer(_partial(self._path), self._kernels)
            except OSError as error:
                _log.warning("Packed weights are not kept: %s.", error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._held:
            if self._writer is not None and self._writer.close(whole=error is None):
                os.replace(_partial(self._path), self._path)
                _evict(self._path, self._limit)
                _log.info("Packed weights are kept in %s", self._path)
            if self._mapping is not None:
                if self._lacking:  # written by other code: the next start writes it anew
                    self._path.unlink(missing_ok=True)
                else:
                    with suppress(OSError):  # of another user, or removed
                        os.utime(self._path)
            self._mapping = self._writer = None

    def get(self, name: str, pack: Callable[[], P]) -> P:
        """Return what `pack` returns, mapped from the file if it is there.

        This may be a tensor, a PackedWeight, a BlockWeight, or a list of them. Anything else is packed at each start.
        """
        if self._mapping is not None:
            if (entry := self._index.get(name)) is not None:
                found: P = _unpacked(entry, self._mapping, 0, self._kernels)
                return found
            if name not in self._index:
                self._lacking.append(name)
        packed = pack()
        return packed if self._writer is None else self._writer.put(name, packed)

    def _read(self) -> bool:
        """Map the file, and return whether it is there and whole."""
        try:
            with self._path.open("rb") as file:
                index = _read_index(file)
                self._mapping = _map(file.fileno(), 0, index["size"])
                with suppress(OSError):  # a kernel without large pages
                    self._mapping.madvise(mmap.MADV_HUGEPAGE)
        except (OSError, ValueError):
            return False
        self._index = index["names"]
        return True

    def _lock(self) -> None:
        """Let one process pack, and others wait for it."""
        lock = self._held.enter_context(_lock_of(self._path).open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("weights     another process packs them, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)


class _Writer:
    """A file that grows by what is put into it, by several threads at once."""

    def __init__(self, path: Path, kernels: Library) -> None:
        self._path = path
        self._kernels = kernels
        self._file = path.open("wb+")
        self._names: dict[str, Any] = {}
        self._size = 0
        self._end = 0
        self._lock = threading.Lock()
        self._failed = False

    def put(self, name: str, packed: P) -> P:
        """Write weights, and return them mapped from the file; unchanged if they cannot be written."""
        entry, tensors = _layout(packed)
        if self._failed or not tensors:
            self._names[name] = None
            return packed
        size = sum(_padded(tensor.nbytes) for tensor in tensors)
        try:
            with self._lock:
                begin, self._size = self._size, self._size + size
                self._grow()
            at = begin
            for tensor in tensors:
                _write(self._file.fileno(), tensor, at)
                at += _padded(tensor.nbytes)
            mapping = _map(self._file.fileno(), begin, size)
        except OSError as error:
            _log.warning("Packed weights are not kept: %s.", error)
            self._failed = True
            return packed
        for part in entry["parts"]:
            part["offset"] += begin
        self._names[name] = entry
        result: P = _unpacked(entry, mapping, begin, self._kernels)
        return result

    def _grow(self) -> None:
        """Make the file at least as long as its data, in steps of large pages."""
        while self._end < self._size:
            _write(self._file.fileno(), torch.zeros(LARGE_PAGE, dtype=torch.uint8), self._end)
            self._end += LARGE_PAGE

    def close(self, whole: bool) -> bool:
        """Finish the file, and return whether it is whole; otherwise it is removed."""
        with self._file:
            if whole and not self._failed and any(self._names.values()):
                try:
                    os.ftruncate(self._file.fileno(), self._size)
                    _write_index(self._file, {"names": self._names, "size": self._size})
                    return True
                except OSError as error:
                    _log.warning("Packed weights are not kept: %s.", error)
            self._path.unlink(missing_ok=True)
            return False


def _layout(packed: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the index's entry, with offsets from the first tensor, and the tensors to write; none if that is
    impossible."""
    items = packed if isinstance(packed, list) else [packed]
    parts, tensors, offset = [], [], 0
    for item in items:
        if not isinstance(item, (Tensor, PackedWeight, BlockWeight)):
            return {}, []
        tensor = item if isinstance(item, Tensor) else item.data
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided or not tensor.is_contiguous():
            return {}, []
        part = {"offset": offset, "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
        if not isinstance(item, Tensor):
            part |= {"rows": item.rows, "columns": item.columns}
        parts.append(part | ({"type": item.name} if isinstance(item, BlockWeight) else {}))
        tensors.append(tensor)
        offset += _padded(tensor.nbytes)
    return {"parts": parts, "list": isinstance(packed, list)}, tensors


def _unpacked(entry: dict[str, Any], mapping: mmap.mmap, begin: int, kernels: Library) -> Any:
    """Return what was put, from a mapping of the file that starts at `begin`."""
    items: list[Tensor | PackedWeight | BlockWeight] = []
    for part in entry["parts"]:
        dtype, shape = _DTYPES[part["dtype"]], part["shape"]
        count = int(torch.Size(shape).numel())
        data = torch.frombuffer(mapping, dtype=dtype, count=count, offset=part["offset"] - begin).view(shape)
        if "type" in part:
            items.append(BlockWeight(data, part["type"], part["rows"], part["columns"]))
        else:
            items.append(PackedWeight(data, part["rows"], part["columns"], kernels) if "rows" in part else data)
    return items if entry["list"] else items[0]


def _map(file: int, begin: int, size: int) -> mmap.mmap:
    """Map a part of the file; writes to it go to a private copy."""
    return mmap.mmap(file, size, access=mmap.ACCESS_COPY, offset=begin)


def _write(file: int, tensor: Tensor, at: int) -> None:
    rest = memoryview(tensor.flatten().view(torch.uint8).numpy().data)
    while rest:
        written = os.pwrite(file, rest, at)
        rest, at = rest[written:], at + written


def _write_index(file: BinaryIO, index: dict[str, Any]) -> None:
    words = json.dumps(index).encode()
    file.seek(index["size"])
    file.write(words + hashlib.sha256(words).digest() + len(words).to_bytes(_LENGTH_SIZE, "little"))
    file.flush()
    os.fsync(file.fileno())  # so that no crash leaves a file of the right length without its data


def _read_index(file: BinaryIO) -> dict[str, Any]:
    """Read the index, or raise ValueError if the file is not whole."""
    tail = _DIGEST_SIZE + _LENGTH_SIZE
    end = os.fstat(file.fileno()).st_size - tail
    if end < 0:
        raise ValueError("too short")
    digest_and_length = os.pread(file.fileno(), tail, end)
    length = int.from_bytes(digest_and_length[_DIGEST_SIZE:], "little")
    if not 0 < length <= end:
        raise ValueError("no index")
    words = os.pread(file.fileno(), length, end - length)
    if hashlib.sha256(words).digest() != digest_and_length[:_DIGEST_SIZE]:
        raise ValueError("a broken index")
    index: dict[str, Any] = json.loads(words)
    if index["size"] != end - length:
        raise ValueError("data are missing")
    return index


def _evict(kept: Path, limit: int) -> None:
    """Remove what killed processes left, and the files that were unused for the longest time, until the rest fits.

    A process that has mapped a removed file keeps it until it ends.
    """
    for partial in kept.parent.glob(f"*{SUFFIX}.partial"):
        _remove_if_abandoned(partial)
    found = []
    for path in kept.parent.glob(f"*{SUFFIX}"):
        with suppress(OSError):  # removed by another process
            found.append((path == kept, (status := path.stat()).st_mtime, status.st_size, path))
    total = 0
    for is_kept, _, size, path in sorted(found, reverse=True):
        total += size
        if total > limit and not is_kept:
            path.unlink(missing_ok=True)


def _remove_if_abandoned(partial: Path) -> None:
    # an OSError: another process writes the file now
    with suppress(OSError), _lock_of(partial.with_suffix("")).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")


def _padded(size: int) -> int:
    return -(-size // PAGE) * PAGE
