"""Reads PEFT's adapters: adapter_config.json and adapter_model.safetensors, against a model's modules.

Every tensor finds its place or is refused by name; nothing of an adapter is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.errors import CheckpointError
from quire.models.lora.magnitudes import BaseNorms, OpenCheckpoint
from quire.models.lora.settings import AdapterSettings, read_settings
from quire.models.lora.targets import take_spans
from quire.models.lora.updates import HostAdapter, LowRankUpdates
from quire.models.quantization.scheme import ExpertsShape
from quire.models.weights.safetensors_files import text_name

_WRAPPED = ".base_layer"
GATE_UP, DOWN = "gate_up_proj", "down_proj"
WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_NAME = re.compile(
    r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:(?P<half>[AB])\.weight|(?P<vector>magnitude_vector)(?:\.weight)?)$"
)
_A, _B, _MAGNITUDES = "A", "B", "magnitude_vector"
_REASONS = (
    (".lora_embedding_", "adapters of embeddings are not served: merge the adapter into the model"),
    (".bias", "biases of adapters are not served: merge the adapter into the model"),
    (".experts.", "this model has no such experts"),
    *(
        (f"{head}.", "adapters of the head are not served: merge the adapter into the model")
        for head in ("lm_head", "pooler.dense", "classifier", "score", "pre_classifier")
    ),
    ("embed_tokens.", "changed embeddings are not served: merge the adapter into the model"),
)
_READABLE = ("F32", "F16", "BF16", "F64")


def experts_of(module: str) -> str:
    """The module of experts that PEFT's name of a module means."""
    return module.removesuffix(_WRAPPED)


def parameter_of(shape: ExpertsShape, a: tuple[int, ...], b: tuple[int, ...]) -> str | None:
    """Which parameter tensors of these shapes change: GATE_UP or DOWN; None: neither."""
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        return None
    inner = len(shape.names.first) * shape.width
    return {(shape.hidden, inner): GATE_UP, (shape.width, shape.hidden): DOWN}.get((a[1], b[0]))


def by_expert(shape: ExpertsShape, parameter: str, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the module's name, A [rank, columns] and B [rows, rank] of each expert's projections, of a parameter
    GATE_UP or DOWN with a [experts · rank, columns] and b [rows, rank · experts].

    PEFT wraps the parameters of transformers' stacked experts (`target_parameters`): A of all experts lie below each
    other, and in B the expert is the last of the indices of a column. Where both parameters of a layer are wrapped, one
    wraps the other, and their names say which one is outside, but not which one it is: shapes do.
    """
    all_a = a.view(shape.count, -1, a.shape[1])
    all_b = b.view(len(b), -1, shape.count)
    names = shape.names
    for number in range(shape.count):
        own_a, own_b = all_a[number], all_b[:, :, number]
        expert = f"{shape.name}.{number}"
        if parameter == DOWN:
            yield f"{expert}.{names.down}", own_a, own_b
            continue
        for name, part in zip(names.first, own_b.chunk(len(names.first)), strict=True):
            yield f"{expert}.{name}", own_a, part


@dataclass
class _Module:
    """What an adapter has of a module: the adapter's own name of it, which the patterns of its settings match, its
    tensors' names and shapes in the file by A, B and magnitudes, and what B A is multiplied by."""

    named: str
    names: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    rank: int = 0
    scale: float = 0.0


def read_adapter(
    directory: Path,
    updates: LowRankUpdates,
    dtype: torch.dtype,
    open_base: OpenCheckpoint,
    older: Sequence[tuple[str, str]] = (),
) -> HostAdapter:
    """Read an adapter as a device's slot holds it.

    All ranks that divide a model check the whole adapter, and find the same digest.

    Args:
        updates: What adapters may change in the model.
        dtype: The model's.
        open_base: Opens the base model's files, if norms of its weights are needed.
        older: Beginnings of modules' names in some checkpoints of the model, each with what it stands for.

    Raises:
        CheckpointError: The files are broken, or do not fit this model or server; the message names the tensor.
    """
    settings, path = read_settings(directory), directory / WEIGHTS
    if not path.is_file():
        hint = "save the adapter"
        if (directory / _PICKLED).exists():
            hint = f"{_PICKLED} may run code as it is read: save the adapter as safetensors"
        raise CheckpointError(f"{directory} has no {WEIGHTS}: {hint}.")
    try:
        with safe_open(str(path), framework="pt") as file, BaseNorms(open_base) as norms:
            modules = _modules(file, path, updates, older)
            _check(modules, settings, updates, path)
            return _Reader(updates, dtype, norms, path).read(file, modules, settings)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is broken or cut short ({error}): write the adapter again.") from None


class _Reader:
    """Puts the tensors of a file where a slot has them."""

    def __init__(self, updates: LowRankUpdates, dtype: torch.dtype, norms: BaseNorms, path: Path) -> None:
        self._updates = updates
        self._norms = norms
        self._path = path
        zeros = np.zeros((1, updates.size * dtype.itemsize), np.uint8)  # torch's would write them
        self._weights = torch.from_numpy(zeros).view(dtype)
        self._ranks = torch.zeros((2, updates.number), dtype=torch.int64)
        self._views = list(updates.views(self._weights))

    def read(self, file: safe_open, modules: dict[str, _Module], settings: AdapterSettings) -> HostAdapter:
        digest = sha256(json.dumps([str(self._weights.dtype), settings.rank_stabilised]).encode())
        for module, each in sorted(modules.items()):
            tensors = {}
            for half, name in sorted(each.names.items()):
                stored = tensors[half] = file.get_tensor(name)  # type: ignore[no-untyped-call]
                if not torch.stack(torch.aminmax(stored)).isfinite().all():  # of each value it takes much longer
                    raise CheckpointError(
                        f"{self._path}: {name} has values that are not finite: write the adapter again."
                    )
                digest.update(json.dumps([module, half, each.rank, each.scale, str(stored.dtype)]).encode())
                digest.update(stored.contiguous().view(torch.uint8).numpy().data)
            a, b = tensors[_A], tensors[_B]
            if (shape := self._updates.experts.get(experts_of(module))) is not None:
                parameter = parameter_of(shape, a.shape, b.shape)
                assert parameter is not None, "shapes are checked"
                for expert, own_a, own_b in by_expert(shape, parameter, a, b):
                    self._place(expert, each, own_a, own_b)
                continue
            self._place(module, each, a, b, tensors.get(_MAGNITUDES))
        return HostAdapter(self._weights[0], self._ranks, digest.hexdigest())

    def _place(self, module: str, of: _Module, a: Tensor, b: Tensor, magnitudes: Tensor | None = None) -> None:
        """Copy this rank's part of one module: A [rank, columns], B [rows, rank], and magnitudes [rows]."""
        target, rank = self._updates.targets[module], of.rank
        if (part := target.part) is None:
            return
        views, first = self._views[part.update], part.module * self._updates.rank
        views.a[0, first : first + rank].copy_(take_spans(a, 1, part.columns))
        own_b, to = take_spans(b, 0, part.rows), views.b[0, part.outputs, :rank]
        if magnitudes is not None:
            try:
                factors, summands = self._norms.factors(module, target, magnitudes, a.float(), b.float() * of.scale)
            except CheckpointError as error:
                raise CheckpointError(f"{self._path}: {error.message}.") from None
            views.factors[0, part.outputs].copy_(factors - 1)
            views.summands[0, part.outputs].copy_(summands)
            self._ranks[1, part.update] = 1
            to.copy_(own_b.float() * of.scale * factors.unsqueeze(1))
        elif own_b.dtype == to.dtype:
            torch.mul(own_b, of.scale, out=to)  # in fp32 too, but without a copy in new memory, which takes longest
        else:
            to.copy_(own_b.float() * of.scale)
        self._ranks[0, part.update] = max(int(self._ranks[0, part.update]), rank)


def _modules(
    file: safe_open, path: Path, updates: LowRankUpdates, older: Sequence[tuple[str, str]]
) -> dict[str, _Module]:
    modules: dict[str, _Module] = {}
    for name in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 (a handle is no dict)
        found = _NAME.match(name)
        if found is None:
            raise CheckpointError(f"{path}: {name}: {_reason(name, 'it is no tensor of a LoRA adapter')}.")
        stored = file.get_slice(name)  # type: ignore[no-untyped-call]
        if str(stored.get_dtype()) not in _READABLE:
            raise CheckpointError(f"{path}: {name} is of type {stored.get_dtype()}, and not {', '.join(_READABLE)}.")
        module = updates.own_name(_standard(text_name(found["module"]) or found["module"], older))
        half = found["half"] or found["vector"]
        own = modules.setdefault(module, _Module(found["module"], {}, {}))
        if half in own.names:
            raise CheckpointError(f"{path}: {name} and {own.names[half]} are the same tensor twice.")
        own.names[half], own.shapes[half] = name, tuple(stored.get_shape())
    if not modules:
        raise CheckpointError(f"{path} has no tensors: write the adapter again.")
    return modules


def _standard(module: str, older: Sequence[tuple[str, str]]) -> str:
    begins = ((begin, standard) for begin, standard in older if module.startswith(begin))
    return next((standard + module.removeprefix(begin) for begin, standard in begins), module)


def _check(modules: dict[str, _Module], settings: AdapterSettings, updates: LowRankUpdates, path: Path) -> None:
    """Check that all shapes fit, and give each module its rank and scale."""
    for module, each in modules.items():
        first = each.names[min(each.names)]
        is_experts = experts_of(module) in updates.experts
        if module not in updates.targets and not is_experts:
            known = sorted({name.rpartition(".")[2] for name in updates.targets})
            unknown = f"adapters may change {', '.join(known)} of this model's layers"
            raise CheckpointError(f"{path}: {first}: {_reason(first, unknown)}.")
        if not {_A, _B} <= each.names.keys():
            raise CheckpointError(f"{path}: {first} has no other half.")
        if settings.has_magnitudes != (_MAGNITUDES in each.names):
            differs = "use_dora is set, and it has no magnitudes" if settings.has_magnitudes else "use_dora is not set"
            raise CheckpointError(f"{path}: {each.names.get(_MAGNITUDES, first)}: {differs}: write the adapter again.")
        if settings.has_magnitudes and not updates.takes_magnitudes(module):
            raise CheckpointError(
                f"{path}: {each.names[_MAGNITUDES]}: DoRA of experts is served on CPUs alone, and with tensors of each "
                "expert: merge the adapter into the model."
            )
        for half, expected in _expected(module, each, settings, updates):
            if each.shapes[half] != expected:
                raise CheckpointError(
                    f"{path}: {each.names[half]} is {list(each.shapes[half])}, but this model and the adapter's rank "
                    f"ask for {list(expected)}: is it an adapter of this model?"
                )
        if each.rank > updates.limit:
            most = f"more than --max-lora-rank {updates.limit}"
            raise CheckpointError(f"{path}: {first} has rank {each.rank}, {most}: start the server with a larger one.")


def _expected(
    module: str, each: _Module, settings: AdapterSettings, updates: LowRankUpdates
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Set a module's rank and scale, and yield the shapes that its tensors should have."""
    name, experts = each.named, 1
    if (shape := updates.experts.get(experts_of(module))) is not None:
        parameter = parameter_of(shape, each.shapes[_A], each.shapes[_B]) or DOWN
        stacked = parameter if shape.names.gate or parameter == DOWN else shape.names.up
        name, experts = f"{experts_of(name)}.{stacked}", shape.count
        inner = len(shape.names.first) * shape.width
        rows, columns = (shape.hidden, shape.width) if parameter == DOWN else (inner, shape.hidden)
    else:
        target = updates.targets[module]
        rows, columns = target.rows, target.columns
    each.rank = settings.rank_of(name)
    each.scale = settings.scale_of(name, each.rank)
    yield _A, (experts * each.rank, columns)
    yield _B, (rows, experts * each.rank)
    if _MAGNITUDES in each.names:
        yield _MAGNITUDES, (rows,)


def _reason(name: str, otherwise: str) -> str:
    return next((why for part, why in _REASONS if part in name), otherwise)
