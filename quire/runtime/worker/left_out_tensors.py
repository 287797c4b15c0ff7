"""Checks tensors in checkpoints that no model reads, against the values that the model computes instead."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quire.models.rope import rotary_frequencies
from quire.models.rope_spec import RopeSpec
from quire.models.spec import ModelSpec
from quire.models.weights.checkpoint import Checkpoint
from quire.models.weights.safetensors import DTYPES

_TOLERANCE = 0.02
"""Relative tolerance of frequencies, which old checkpoints store in half precision."""
_SMALLEST = 1e-6
"""Absolute tolerance of frequencies: half precision has no digits for smaller ones."""
_MAX_MASKED = -1e3


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
    width = spec.attention.head_dim
    expected = [rotary_frequencies(each, width) for rope in spec.ropes for each in (rope, _plain(rope))]
    return any(
        value.shape == each.shape and torch.allclose(value, each, rtol=_TOLERANCE, atol=_SMALLEST) for each in expected
    )


def _plain(rope: RopeSpec) -> RopeSpec:
    return RopeSpec(rope.theta, None, rope.share)


def _is_causal(value: Tensor) -> bool:
    side = math.isqrt(value.numel())
    return value.numel() == side * side and torch.equal(value.view(side, side), torch.ones(side, side).tril())
