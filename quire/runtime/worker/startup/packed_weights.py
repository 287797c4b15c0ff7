"""Finds the file of packed weights from an earlier start. Only CPU workers keep such files, for checkpoints above a
minimum size."""

from __future__ import annotations

import hashlib
import logging
import shutil
from pathlib import Path

import torch

import quire.compute.kernels.cpu
from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.cpu.packed_weight_file import SUFFIX, PackedWeightFile
from quire.compute.mesh import Mesh
from quire.foundation.config import Config, ModelConfig, environment
from quire.models.spec import ModelSpec
from quire.models.weights.gguf import find_gguf_files
from quire.models.weights.safetensors_files import find_files
from quire.models.weights.tensor_options import PackedAtStart, PackedWeights

LEAST_BYTES = 1 << 26
"""Smaller weights are packed again at each start, which takes less than 0.1 s."""
_FREE_SHARE = 0.5
"""The maximum share of the disk's free space that a file may take."""
_log = logging.getLogger(__name__)


def packed_weights_for(config: Config, spec: ModelSpec, device: torch.device, mesh: Mesh) -> PackedWeights:
    """Return the file for this checkpoint's packed weights, or PackedAtStart if none is kept."""
    size = spec.weight_bytes(config.model.dtype)
    if device.type != "cpu" or config.load.load_format == "dummy" or size < LEAST_BYTES:
        return PackedAtStart()
    cache, kernels = environment.packed_weight_cache(), library()
    if kernels is None or size > cache.limit:
        return PackedAtStart()
    path = cache.directory / f"{_identity(config.model, kernels.name, mesh)}{SUFFIX}"
    if not path.exists() and size > _FREE_SHARE * _free_bytes(cache.directory):
        _log.info("Packed weights are not kept: %s has too little space", cache.directory)
        return PackedAtStart()
    return PackedWeightFile(path, cache.limit, kernels)


def _identity(config: ModelConfig, kernels: str, mesh: Mesh) -> str:
    """Return a name that changes with the checkpoint's files, the weights' format, the rank's part and the code that
    packs them."""
    model = Path(config.model)
    files = [path.resolve() for path in (model / "config.json", *(find_gguf_files(model) or find_files(model)))]
    facts = [(str(path), (s := path.stat()).st_size, s.st_mtime_ns, s.st_ctime_ns) for path in files]
    place = (mesh.rank, mesh.tp, mesh.pp, mesh.ep, mesh.engine)
    packing = [path.read_bytes() for path in sorted(Path(quire.compute.kernels.cpu.__file__).parent.glob("*.py"))]
    return hashlib.sha256(
        repr((facts, config.dtype, config.quantization, kernels, packing, place)).encode()
    ).hexdigest()[:24]


def _free_bytes(directory: Path) -> int:
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free
