"""Reads a model's weights from its checkpoint into its layers, and checks tensors that no model reads."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import ConfigError, MemoryBudgetError
from quire.foundation.clock import Clock, SystemClock
from quire.foundation.config import Config
from quire.models.audio.hearing_spec import HearingSpec
from quire.models.layers.factory import LayerFactory
from quire.models.layers.layer import Layer, load_all_weights, weight_specs_of
from quire.models.lora.updates import LowRankUpdates
from quire.models.model import build_model
from quire.models.mtp_spec import MtpSpec
from quire.models.rope import rotary_frequencies
from quire.models.rope_spec import RopeSpec
from quire.models.spec import ModelSpec
from quire.models.vision.module_spec import ModuleVisionSpec
from quire.models.vision.vision_spec import VisionSpec
from quire.models.weights.checkpoint import Checkpoint, WeightSpec, check_weights
from quire.models.weights.dummy import DummyCheckpoint
from quire.models.weights.float16_range import refusing_overflow
from quire.models.weights.gguf import GgufCheckpoint, find_gguf_files
from quire.models.weights.progress import ReadingProgress
from quire.models.weights.safetensors import DTYPES, SafetensorsCheckpoint
from quire.models.weights.safetensors_files import is_of_layer, text_name
from quire.models.weights.standard_names import (
    Renamed,
    WithZeroBiases,
    head_part,
    tower_part,
    with_standard_names,
)
from quire.models.weights.tensor_options import TensorOptions

_TOLERANCE = 0.02
"""Relative tolerance of frequencies, which old checkpoints store in half precision."""
_SMALLEST = 1e-6
"""Absolute tolerance of frequencies: half precision has no digits for smaller ones."""
_MAX_MASKED = -1e3
_GB = 1e9
_log = logging.getLogger(__name__)


def load_weights(config: Config, spec: ModelSpec, whole: ModelSpec, factory: LayerFactory, clock: Clock) -> None:
    """Read the weights of all layers that the factory built.

    Args:
        spec: Spec of this rank's share of the model.
        whole: Spec of the whole model, all of whose weights the files must have.

    Raises:
        CheckpointError: The checkpoint does not fit the model.
        MemoryBudgetError: There is not enough memory.
    """
    dtype, specs = config.model.dtype, weight_specs_of(factory.layers)
    if len(spec.layers) < len(whole.layers):
        specs = weight_specs_of(undivided_layers(whole, factory.options))
    size = spec.weight_bytes(dtype)
    checkpoint = open_checkpoint(config, spec, specs)
    for line in left_out(checkpoint, spec):
        _log.warning("weights     %s", line)
    progress = ReadingProgress(size, clock, config.load.use_tqdm_on_load)
    try:
        with factory.options.packed_weights, refusing_overflow(checkpoint, factory.options.dtype) as checked:
            load_all_weights(factory.layers, checked, torch.get_num_threads(), progress)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        raise MemoryBudgetError(
            f"The weights need {size / _GB:.1f} GB as {dtype}, which this machine cannot give: "
            "use --dtype bfloat16 or a smaller model."
        ) from None
    finally:
        checkpoint.close()
    gigabytes = size / _GB
    rate = gigabytes / (progress.seconds or 1)
    _log.debug("weights     %.2f GB in %.1f s, %.2f GB/s", gigabytes, progress.seconds, rate)


def open_checkpoint(config: Config, spec: ModelSpec, specs: list[WeightSpec]) -> Checkpoint:
    """Open the model's files, and check that they have all weights in `specs`. The caller closes them.

    Raises:
        CheckpointError: The checkpoint does not fit the model.
    """
    checkpoint = _open(config, spec, specs)
    if spec.fallback is None:  # else transformers converts names, and compares them
        check_weights(checkpoint, specs, spec.architecture)
    return checkpoint


def undivided_layers(spec: ModelSpec, options: TensorOptions, updates: LowRankUpdates | None = None) -> list[Layer]:
    """Describe the layers of all ranks together, without loading them. `updates` receives what adapters may change in
    them."""
    factory = LayerFactory(options, spec.quantization, updates=updates)
    build_model(spec, factory)
    return factory.layers


def load_fusion(config: Config, head: ModelSpec, factory: LayerFactory) -> None:
    """Read the weights of a draft head's fusion, the only layer that `factory` has built. `config` names the head's
    files.

    Raises:
        CheckpointError: The head's checkpoint does not fit.
    """
    specs = weight_specs_of(factory.layers)
    checkpoint = _open(config, head, specs, fusion=True)
    try:
        check_weights(checkpoint, specs, head.architecture)
        load_all_weights(factory.layers, checkpoint, 1, ReadingProgress(0, SystemClock(), False))
    finally:
        checkpoint.close()


def load_encoder(config: Config, factory: LayerFactory, unbiased: tuple[str, ...]) -> None:
    """Read the weights of an encoder of sounds, whose layers `factory` has built.

    Args:
        config: The settings, which name the files.
        factory: Its `layers` are loaded.
        unbiased: Ends of names of modules that have no bias where the layers have one.

    Raises:
        CheckpointError: The checkpoint does not fit the encoder.
    """
    specs = weight_specs_of(factory.layers)
    if config.load.load_format == "dummy":
        checkpoint: Checkpoint = DummyCheckpoint(specs, config.model.seed)
    else:
        files = WithZeroBiases(SafetensorsCheckpoint(Path(config.model.model)), unbiased)
        checkpoint = tower_part(files, {spec.name for spec in specs})
    try:
        check_weights(checkpoint, specs, "the encoder of sounds")
        load_all_weights(factory.layers, checkpoint, 1, ReadingProgress(0, SystemClock(), False))
    finally:
        checkpoint.close()


def load_tower(config: Config, spec: VisionSpec | HearingSpec, factory: LayerFactory) -> None:
    """Read the weights of a tower for images or sounds, whose layers `factory` has built.

    Raises:
        CheckpointError: The checkpoint does not fit the tower.
    """
    specs = weight_specs_of(factory.layers)
    if config.load.load_format == "dummy":
        checkpoint: Checkpoint = DummyCheckpoint(specs, config.model.seed)
    else:
        checkpoint = SafetensorsCheckpoint(Path(config.model.model))
    try:
        if not isinstance(spec, ModuleVisionSpec | HearingSpec):  # else transformers converts names, and compares them
            checkpoint = tower_part(checkpoint, {spec.name for spec in specs})
            check_weights(checkpoint, specs, "the tower for images")
        load_all_weights(factory.layers, checkpoint, 1, ReadingProgress(0, SystemClock(), False))
    finally:
        checkpoint.close()


def _open(config: Config, spec: ModelSpec, specs: list[WeightSpec], *, fusion: bool = False) -> Checkpoint:
    directory = Path(config.model.model)
    is_gguf, is_dummy = bool(find_gguf_files(directory)), config.load.load_format == "dummy"
    if is_gguf and is_dummy:
        raise ConfigError("--load-format dummy has no blocks of GGUF's types: leave it out.", param="load_format")
    if is_dummy:
        return DummyCheckpoint(specs, config.model.seed)
    if is_gguf:
        return GgufCheckpoint(directory)
    files: Checkpoint = SafetensorsCheckpoint(directory)
    if isinstance(spec.head, MtpSpec):
        files = Renamed(files, spec.head.names_in(files.contents()))
    elif spec.head is not None:
        return head_part(files, fusion)
    if spec.fallback is not None:
        return files
    speculation = config.speculation.speculation
    if speculation is None or speculation.method != "mtp":
        _log_other_parts(files, spec.mtp_layers, sees=spec.vision is not None)
    modules = spec.family.modules
    _log_unread(files, modules.unread_in_layers)
    return with_standard_names(
        files,
        tied=spec.tie_embeddings,
        left_out=spec.mtp_layers,
        expert=modules.expert,
        transposed_experts=modules.transposed_experts,
        others=modules.others,
        older=modules.older,
        unread=spec.unread,
        unbiased=modules.unbiased,
        joined=modules.joined,
    )


def _log_other_parts(files: Checkpoint, layers: range, *, sees: bool) -> None:
    """Log which parts of a multimodal model are left out, unless it `sees` images, and which predict several tokens, as
    these layers do."""
    several: dict[str, int] = {}
    others: dict[str, int] = {}
    for name in files.contents():
        text = text_name(name)
        part = name.removeprefix("model.").partition(".")[0]
        if text is None:
            counts = several if part.startswith("mtp") else others
            counts[part] = counts.get(part, 0) + 1
        elif is_of_layer(text, layers):
            part = f"layer {text.split('.')[2]}"
            several[part] = several.get(part, 0) + 1
    for counts, reason in ((others, "the text model alone is served"), (several, "one token is predicted at a time")):
        if counts and not (sees and counts is others):
            parts = ", ".join(sorted(counts))
            _log.info("weights     %s: %s (%d tensors) left out", reason, parts, sum(counts.values()))


def _log_unread(files: Checkpoint, names: tuple[str, ...]) -> None:
    """Log which modules of layers are not computed."""
    for name in names:
        tensors = sum(f".{name}." in stored for stored in files.contents())
        if tensors:
            _log.info("weights     %s (%d tensors) of all layers left out: nothing served needs them", name, tensors)


def left_out(checkpoint: Checkpoint, spec: ModelSpec) -> Iterator[str]:
    """Yield a warning for each kind of tensor that differs from the values computed from config.json, which take
    precedence, as in transformers. `spec` may describe a rank's share of the model."""
    kinds: dict[str, tuple[str, Callable[[Tensor], bool]]] = {
        ".rotary_emb.inv_freq": ("the rotary frequencies of config.json", lambda value: _is_rotary(value, spec)),
        ".attn.bias": ("a causal mask", _is_causal),
        ".attn.masked_bias": ("a large negative number", lambda value: bool((value <= _MAX_MASKED).all())),
    }
    wrong: dict[str, list[str]] = defaultdict(list)
    for name, stored in sorted(checkpoint.contents().items()):
        kind = next((kind for kind in kinds if name.endswith(kind)), None)
        dtype = DTYPES.get(stored.dtype)
        if kind is None or dtype is None:
            continue
        value = torch.empty(stored.shape, dtype=dtype)
        checkpoint.read(name, value)
        if not kinds[kind][1](value.float()):
            wrong[kind].append(name)
    for kind, names in wrong.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{more}: not {kinds[kind][0]}, as they are computed: left out, as in transformers"


def _is_rotary(value: Tensor, spec: ModelSpec) -> bool:
    """Whether these are the model's rope frequencies, before or after scaling."""
    scaled = {(each.rope, each.rotated) for each in (layer.mixer for layer in spec.layers) if each.rope is not None}
    plain = {(RopeSpec(rope.theta, None, rope.share), width) for rope, width in scaled}
    expected = [rotary_frequencies(rope, width) for rope, width in scaled | plain]
    return any(
        value.shape == each.shape and torch.allclose(value, each, rtol=_TOLERANCE, atol=_SMALLEST) for each in expected
    )


def _is_causal(value: Tensor) -> bool:
    side = math.isqrt(value.numel())
    return value.numel() == side * side and torch.equal(value.view(side, side), torch.ones(side, side).tril())
