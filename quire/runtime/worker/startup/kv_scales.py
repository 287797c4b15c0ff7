"""Chooses the scales of a quantized KV cache, one for the keys and one for the values of each KV head of each layer.

They come from the checkpoint, or from calibration: a built-in text runs through the model once, with attention in the
model's own dtype, and sets the largest magnitude that each head stores.
"""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path

import torch
from torch import Tensor

from quire.compute.attention.backend import AttentionBackend, AttentionLayer, StepRows
from quire.compute.attention.limits import PaddedLimits
from quire.compute.attention.metadata import AttentionMetadata, IntArray
from quire.compute.attention.sequence_states import AttentionBesideStates
from quire.compute.kernels.reference.attention_inputs import (
    CacheWrite,
    PagedKV,
    PagedRows,
    QKNormRope,
    QueryTiles,
)
from quire.compute.kernels.reference.paged_attention import prefill_attention
from quire.compute.kernels.reference.quantized_rows import LARGEST
from quire.compute.kernels.reference.rowwise_attention import qk_norm_rope_and_cache
from quire.compute.kernels.reference.state_inputs import StateRows
from quire.errors import CheckpointError
from quire.foundation.config import Config
from quire.foundation.config.cache import QUANTIZED
from quire.models.layers.rotary import Positions
from quire.models.model import Model
from quire.models.spec import ModelSpec
from quire.models.weights.safetensors import SafetensorsCheckpoint
from quire.runtime.worker.kv_tensors import DENSE, ELEMENTS, mask_of
from quire.runtime.worker.state_tensors import StateTensors

CALIBRATION_TEXT = Path(__file__).with_name("calibration_text.txt")
"""The text from which scales are calibrated. It mixes prose, figures, code, markup and several scripts, because models'
keys and values differ most between these."""
_TOKENS = 512
"""Maximum number of tokens of the text that are read."""
_ROOM = {"fp8_e4m3": 2.0, "fp8_e5m2": 2.0, "int8": 1.1}
"""How many times the largest calibrated magnitude the cache can store; larger values are clipped. Floats lose no
precision by the extra room."""
_STORED = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\..*?(?:^|[._])(k|v|kv)_scale$")
_log = logging.getLogger(__name__)


def new_kv_scales(spec: ModelSpec, kv_dtype: str, device: torch.device) -> Tensor | None:
    """Return scales [layers, 2, kv_heads] fp32, all 1, for as many heads as the widest layer has; None if the cache is
    not quantized."""
    if kv_dtype not in QUANTIZED:
        return None
    return torch.ones((len(spec.layers), 2, _most_heads(spec)), device=device)


def _most_heads(spec: ModelSpec) -> int:
    return max(layer.mixer.kv_heads for layer in spec.layers)


def choose_kv_scales(config: Config, spec: ModelSpec, model: Model, scales: Tensor) -> None:
    """Fill `scales`, as `new_kv_scales` returned them. The model's weights must be loaded.

    Raises:
        CheckpointError: The checkpoint has a scale that is not one positive number.
    """
    directory, kv_dtype = Path(config.model.model), config.kv_dtype
    if kv_dtype.startswith("fp8") and config.load.load_format != "dummy" and list(directory.glob("*.safetensors")):
        stored = _stored_scales(directory, spec)
        if stored is not None:
            scales.copy_(stored[:, :, None].expand(scales.shape))
            _log.info("kv cache    %s, scales from the checkpoint", kv_dtype)
            return
    tokens, source = _calibration_tokens(config, spec)
    with torch.inference_mode():
        most = _largest_of(model, spec, torch.tensor(tokens, device=scales.device), DENSE[config.model.dtype])
    needed = most * (_ROOM[kv_dtype] / LARGEST[ELEMENTS[kv_dtype]])
    if kv_dtype != "int8":  # a power of two changes no digit of a float
        needed = torch.exp2(needed.log2().ceil())
    scales.copy_(torch.where((most > 0) & most.isfinite(), needed, 1.0))
    _log.info("kv cache    %s, scales from %d tokens of %s", kv_dtype, len(tokens), source)


def _stored_scales(directory: Path, spec: ModelSpec) -> Tensor | None:
    """Return the checkpoint's scales [layers, 2], or None if it does not have them for all layers."""
    checkpoint = SafetensorsCheckpoint(directory)
    try:
        found = torch.full((len(spec.layers), 2), math.nan)
        for name in checkpoint.contents():
            if (match := _STORED.search(name)) and int(match[1]) < len(spec.layers):
                value = torch.empty(checkpoint.contents()[name].shape)
                checkpoint.read(name, value)
                if value.numel() != 1 or not 0 < float(value) < math.inf:
                    raise CheckpointError(f"{name} must be one number above 0: it is a scale of the KV cache.")
                found[int(match[1]), {"k": [0], "v": [1], "kv": [0, 1]}[match[2]]] = float(value)
    finally:
        checkpoint.close()
    return None if found.isnan().any() else found


def _calibration_tokens(config: Config, spec: ModelSpec) -> tuple[list[int], str]:
    """Return the calibration tokens and a name of their source. Without a tokenizer they are spread over the
    vocabulary."""
    longest = min(_TOKENS, spec.max_model_len)
    file = Path(config.model.tokenizer or config.model.model) / "tokenizer.json"
    if file.is_file() and not config.model.skip_tokenizer_init:
        from tokenizers import Tokenizer  # only a calibration reads text: other starts do not pay for it

        text = CALIBRATION_TEXT.read_text(encoding="utf-8")
        ids = [id for id in Tokenizer.from_file(str(file)).encode(text).ids if id < spec.vocab_size]
        if ids:
            return ids[:longest], "a built-in text"
    return [(number * 2_654_435_761) % spec.vocab_size for number in range(longest)], "the vocabulary"


def _largest_of(model: Model, spec: ModelSpec, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest magnitudes of keys and values, [layers, 2, kv_heads]."""
    ranges, positions = _KVRanges(spec, tokens.device), torch.arange(len(tokens), device=tokens.device)
    lengths = positions.clamp(min=len(tokens)) if spec.rope_length_mode else None
    backend: AttentionBackend = ranges
    if spec.state_layers:
        states = StateTensors(spec, 1, dtype, tokens.device).by_layer
        states.begin(StateRows(positions[1:2], torch.tensor([0, len(tokens)], device=tokens.device)))
        backend = AttentionBesideStates(ranges, states)
    model.hidden(tokens, Positions(positions, lengths), backend)
    return ranges.most


class _KVRanges:
    """An AttentionBackend that records magnitudes, for one row without a past; it computes with the reference
    kernels."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._spec = spec
        self._caches: dict[int, PagedKV] = {}  # of the layer itself, and of those that later layers read
        self.most = torch.zeros((len(spec.layers), 2, _most_heads(spec)), device=device)

    def _is_read_again(self, layer: int) -> bool:
        return layer in self._spec.sources[layer + 1 :]

    def build_metadata(
        self, counts: IntArray, bounds: IntArray, limits: PaddedLimits | None = None
    ) -> AttentionMetadata:
        return AttentionMetadata()

    def prepare(self, rows: StepRows) -> None:
        """Do nothing: the only row needs no preparation."""

    def run(self, layer: AttentionLayer, qkv: Tensor, norm_rope: QKNormRope, out: Tensor) -> None:
        n, device, own = len(qkv), qkv.device, self._spec.layers[layer.number].mixer
        source = self._spec.sources[layer.number]
        if source == layer.number:
            planes = (qkv.new_empty((1, n, *plane.shape)) for plane in own.form.planes)
            self._caches[source] = PagedKV(*planes)
        q, place, kv = torch.empty_like(out), torch.arange(n, device=device), self._caches[source]
        qk_norm_rope_and_cache(qkv, norm_rope, CacheWrite(kv, place), q)
        for number, plane in enumerate((kv.keys, kv.values)):
            self.most[layer.number, number, : own.kv_heads] = plane[0].abs().amax(dim=(0, 2)).float()
        if not self._is_read_again(layer.number):
            self._caches.pop(layer.number, None)
        zero, count = place[:1], torch.tensor([n], device=device)
        rows, tiles = PagedRows(zero[None], zero, zero, count), QueryTiles(zero, zero, zero)
        prefill_attention(q, kv, rows, tiles, n, mask_of(own.reach), layer.scores, out)
