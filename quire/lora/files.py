"""Reads PEFT's adapters: adapter_config.json and adapter_model.safetensors, against a model's modules.

Every tensor finds its place or is refused by name; nothing of an adapter is ignored.
"""

from __future__ import annotations

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.errors import CheckpointError
from quire.lora.settings import AdapterSettings, read_settings
from quire.lora.updates import HostAdapter, LowRankUpdates, Target

WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_NAME = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])\.weight$")
_REASONS = (
    (".lora_magnitude_vector", "DoRA is not served: merge the adapter into the model"),
    (".lora_embedding_", "adapters of embeddings are not served: merge the adapter into the model"),
    (".bias", "biases of adapters are not served: merge the adapter into the model"),
    (".experts.", "adapters of experts are not served: merge the adapter into the model"),
    ("lm_head.", "adapters of the head are not served: merge the adapter into the model"),
)
_READABLE = ("F32", "F16", "BF16", "F64")


class _Half(NamedTuple):
    """A tensor A or B.

    Attributes:
        name: In the file.
        module: Whose.
        shape: Its.
    """

    name: str
    module: str
    shape: tuple[int, ...]


def read_adapter(directory: Path, updates: LowRankUpdates, dtype: torch.dtype) -> HostAdapter:
    """An adapter as a device's slot holds it.

    Args:
        directory: Of its files.
        updates: What of the model adapters may change.
        dtype: The model's.

    Raises:
        CheckpointError: The files are broken, or do not fit this model or server; the message names the tensor.
    """
    settings, path = read_settings(directory), directory / WEIGHTS
    if not path.is_file():
        pickled = (directory / _PICKLED).exists()
        hint = f"{_PICKLED} may run code as it is read: save the adapter as safetensors" if pickled else "is it saved?"
        raise CheckpointError(f"{directory} has no {WEIGHTS}: {hint}.")
    try:
        with safe_open(str(path), framework="pt") as file:
            halves = _halves(file, path)
            ranks = _check(halves, settings, updates, path)
            weights = torch.zeros((1, updates.size), dtype=dtype)
            by_product = torch.zeros(updates.number, dtype=torch.int64)
            digest = sha256(json.dumps([str(dtype), settings.rank_stabilised]).encode())
            views = list(updates.views(weights))
            for (module, half), each in sorted(halves.items()):
                target, rank = updates.targets[module], ranks[module]
                scale = settings.scale_of(module, rank)
                stored = file.get_tensor(each.name)
                digest.update(json.dumps([module, half, rank, scale, str(stored.dtype)]).encode())
                digest.update(stored.contiguous().view(torch.uint8).numpy().data)
                by_product[target.update] = max(int(by_product[target.update]), rank)
                _place(stored, half, target, views[target.update], scale, updates)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is broken or cut short ({error}): write the adapter again.") from None
    return HostAdapter(weights[0], by_product, digest.hexdigest())


def _halves(file: safe_open, path: Path) -> dict[tuple[str, str], _Half]:
    """Every tensor of the file, by its module and A or B."""
    halves: dict[tuple[str, str], _Half] = {}
    for name in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 (a handle is no dict)
        found = _NAME.match(name)
        if found is None:
            raise CheckpointError(f"{path}: {name}: {_reason(name, 'it is no tensor of a LoRA adapter')}.")
        stored = file.get_slice(name)  # type: ignore[no-untyped-call]
        if str(stored.get_dtype()) not in _READABLE:
            raise CheckpointError(f"{path}: {name} is of type {stored.get_dtype()}, and not {', '.join(_READABLE)}.")
        key = found["module"], found["half"]
        if key in halves:
            raise CheckpointError(f"{path}: {name} and {halves[key].name} are the same tensor twice.")
        halves[key] = _Half(name, found["module"], tuple(stored.get_shape()))
    if not halves:
        raise CheckpointError(f"{path} has no tensors: write the adapter again.")
    return halves


def _check(
    halves: dict[tuple[str, str], _Half], settings: AdapterSettings, updates: LowRankUpdates, path: Path
) -> dict[str, int]:
    """The rank of each module; all shapes fit."""
    ranks: dict[str, int] = {}
    for (module, half), each in halves.items():
        target = updates.targets.get(module)
        if target is None:
            known = sorted({name.rpartition(".")[2] for name in updates.targets})
            unknown = f"adapters may change {', '.join(known)} of this model's layers"
            raise CheckpointError(f"{path}: {each.name}: {_reason(each.name, unknown)}.")
        if (module, "B" if half == "A" else "A") not in halves:
            raise CheckpointError(f"{path}: {each.name} has no other half.")
        rank = ranks[module] = settings.rank_of(module)
        expected = (rank, target.columns) if half == "A" else (target.rows, rank)
        if each.shape != expected:
            raise CheckpointError(
                f"{path}: {each.name} is {list(each.shape)}, but this model and the adapter's rank ask for "
                f"{list(expected)}: is it an adapter of this model?"
            )
        if rank > updates.limit:
            most = f"more than --max-lora-rank {updates.limit}"
            raise CheckpointError(f"{path}: {each.name} has rank {rank}, {most}: start the server with a larger one.")
    return ranks


def _place(
    stored: Tensor, half: str, target: Target, views: tuple[Tensor, Tensor], scale: float, updates: LowRankUpdates
) -> None:
    """Write a tensor where the slot has it."""
    a, b = views
    if half == "A":
        first = target.module * updates.rank
        a[0, first : first + len(stored)].copy_(stored)
        return
    b[0, target.begin : target.begin + target.rows, : stored.shape[1]].copy_(stored.float() * scale)


def _reason(name: str, otherwise: str) -> str:
    return next((why for part, why in _REASONS if part in name), otherwise)
