"""Safetensors files as a Checkpoint: one file or many with an index, memory-mapped.

The `safetensors` library checks each header (sizes within the file, no overlap, gap or overflow) before anything is
mapped. A processor copies from the mapping; `quire.models.weights.gpu_loader` sends the files' bytes to a GPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.errors import CheckpointError
from quire.models.weights.checkpoint import READABLE_DTYPES, StoredTensor
from quire.models.weights.gpu_loader import CudaCopyStream, FileTensor, GpuTensorLoader
from quire.models.weights.safetensors_files import find_files, located_tensors

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class SafetensorsCheckpoint:
    """All safetensors files of a directory. Raises CheckpointError if there are none, if one is broken, if one that
    the index names is missing, or if a tensor is in two files."""

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, Any] = {}
        self._contents: dict[str, StoredTensor] = {}
        self._paths = find_files(directory)
        self._gpu_reader: _GpuReader | None = None
        self._lock = threading.Lock()
        for path in self._paths:
            self._open(path)

    def contents(self) -> dict[str, StoredTensor]:
        return dict(self._contents)

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        stored = self._contents[name].dtype
        assert stored in READABLE_DTYPES or DTYPES[stored] == out.dtype, f"{name}: {stored} is not cast to {out.dtype}"
        if out.is_cuda:
            self._gpu_reader_of(out.device).read(name, out, start)
            return
        if tuple(out.shape) == self._contents[name].shape:
            out.copy_(self._files[name].get_tensor(name))
            return
        window = tuple(slice(s, s + n) for s, n in zip(start or [0] * out.dim(), out.shape, strict=True))
        out.copy_(self._files[name].get_slice(name)[window])

    def close(self) -> None:
        """Drop the mappings, once all that was read has arrived on devices."""
        self._files.clear()
        if self._gpu_reader is not None:
            self._gpu_reader.close()
            self._gpu_reader = None

    def _gpu_reader_of(self, device: torch.device) -> _GpuReader:
        with self._lock:
            if self._gpu_reader is None:
                self._gpu_reader = _GpuReader(self._paths, GpuTensorLoader(CudaCopyStream(device)))
            return self._gpu_reader

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is broken or cut short ({error}): download it again.") from None
        for name in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 (a handle is no dict)
            if name in self._contents:
                raise CheckpointError(f"{path}: '{name}' stands in another file as well: remove the file too many.")
            tensor = file.get_slice(name)  # type: ignore[no-untyped-call]
            self._contents[name] = StoredTensor(tuple(tensor.get_shape()), str(tensor.get_dtype()))
            self._files[name] = file


class _GpuReader:
    """The files, open for reading by byte ranges, and the loader of the one device that a process has."""

    def __init__(self, paths: Sequence[Path], loader: GpuTensorLoader) -> None:
        self._loader = loader
        self._descriptors = {path: os.open(path, os.O_RDONLY) for path in paths}
        self._tensors = {
            name: FileTensor(self._descriptors[tensor.path], tensor.offset, tensor.shape, DTYPES[tensor.dtype])
            for name, tensor in located_tensors(paths)
            if tensor.dtype in DTYPES
        }

    def read(self, name: str, out: Tensor, start: Sequence[int] | None) -> None:
        self._loader.read(self._tensors[name], out, start)

    def close(self) -> None:
        self._loader.close()
        for file in self._descriptors.values():
            os.close(file)
