"""The rows of the start: from a script's process to the first step its LLM can take, with and without reading files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire.models.layers.factory import LayerFactory
from quire.models.layers.layer import weight_specs_of
from quire.models.model import build_model
from quire.models.spec import read_spec
from quire.models.weights.safetensors_files import INDEX
from quire.models.weights.tensor_options import TensorOptions

ROOT = Path(__file__).resolve().parents[2]
_SHARD_BYTES = 4 * 10**9


def caches(directory: Path) -> dict[str, str]:
    """Variables that put every cache of compiled kernels below a directory."""
    return {name: str(directory / name) for name in ("TRITON_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH")}


def start_engine(
    model: Path, settings: Sequence[str], environment: dict[str, str], scratch: Path, load_format: str = "dummy"
) -> dict[str, float]:
    """Seconds by stage of a process that makes an LLM: `total`, `weights` and others.

    Raises:
        RuntimeError: It did not start.
    """
    result = scratch / "startup.json"
    flags = [f"--{name.replace('_', '-')}={value}" for name, _, value in (pair.partition("=") for pair in settings)]
    command = [
        sys.executable, "-m", "quire.cli.main", "bench", "startup", f"--model={model}", f"--load-format={load_format}",
        "--num-iters-cold=0", "--num-iters-warmup=0", "--num-iters-warm=1", f"--output-json={result}",
        "--skip-tokenizer-init",
    ]  # fmt: skip
    done = subprocess.run([*command, *flags], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"quire bench startup failed:\n{(done.stdout + done.stderr)[-2_000:]}")
    (stages,) = json.loads(result.read_text())["warm_startup_stages"]
    return stages


def write_checkpoint(model: Path, directory: Path) -> int:
    """Random weights of a model as bfloat16 files of at most 4 GB; their bytes in all.

    Raises:
        OSError: No room.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(model / "config.json", directory)
    factory = LayerFactory(TensorOptions(torch.device("cpu"), torch.bfloat16))
    build_model(read_spec(str(model)), factory)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    total = held = 0

    def flush() -> None:
        nonlocal held
        name = f"model-{len(set(weight_map.values())) + 1}.safetensors"
        save_file(shard, directory / name)
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()
        held = 0

    for spec in weight_specs_of(factory.layers):
        size = 2 * torch.Size(spec.shape).numel()
        if shard and held + size > _SHARD_BYTES:
            flush()
        values = torch.empty(spec.shape, dtype=torch.bfloat16, device=device)
        shard[spec.name] = values.uniform_(-1e-3, 1e-3).cpu()
        held, total = held + size, total + size
    flush()
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return total
