"""Which keys and values a model's blocks hold: a digest of all that decides how they are computed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from quire.foundation.config import Config
from quire.version import __version__


def contents_digest(config: Config, *more: object) -> bytes:
    """Return 32 bytes that differ if keys and values are computed in another way: by another version, settings of the
    model (its type and rotary embedding among them), of the cache's elements and blocks, another draft head, other
    ranks, or files of its directory, as far as names, sizes and times tell; and if `more` differs, of numbers, texts
    and bytes."""
    path = Path(config.model.model)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    seen = [(file.name, (found := file.stat()).st_size, found.st_mtime_ns) for file in files if file.exists()]
    parallel, cache = config.parallel, config.cache
    settings = (config.model, config.kv_dtype, cache.block_size, config.device.device, config.speculation)
    ranks = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    return hashlib.sha256(msgspec.json.encode((__version__, settings, ranks, seen, more))).digest()
