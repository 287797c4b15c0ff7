"""Rotary position embedding (RoPE): the frequencies of each kind of scaling, and the layer that applies them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference import rotary as reference
from quire.models.layer_spec import LayerSpec, QueryScaleSpec
from quire.models.layers.rotary import Angles, AxialRotary, Positions, Rotary
from quire.models.rope_spec import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    RopeSpec,
    YarnScaling,
)
from quire.models.weights.tensor_options import TensorOptions


class Rotaries:
    """The rotary embeddings of a model's layers, each computed once a step.

    Args:
        layers: The layers of this rank, in order.
        options: The device and dtype of angles.
    """

    def __init__(self, layers: Sequence[LayerSpec], options: TensorOptions) -> None:
        mixers = [layer.mixer for layer in layers]
        of_mixers = [
            (None if mixer.rope is None else (mixer.rope, mixer.rotated), mixer.query_scale) for mixer in mixers
        ]
        own = list(dict.fromkeys(of_mixers))
        ropes, scales = dict.fromkeys(rope for rope, _ in own), dict.fromkeys(scale for _, scale in own)
        self._rotaries = {rope: build_rotary(*rope, options) for rope in ropes if rope is not None}
        self._scales = [scale for scale in scales if scale is not None]
        self._query_scales = kernel("query_scales", options.device.type)
        self._own = own
        self._of_layer = [own.index(each) for each in of_mixers]

    def __call__(self, positions: Positions) -> list[Angles | None]:
        """Return the angles for each layer; None for a layer that rotates nothing."""
        rotated: dict[tuple[RopeSpec, int] | None, Angles] = {
            rope: rotary(positions) for rope, rotary in self._rotaries.items()
        }
        if not self._scales:
            plain = [None if rope is None else rotated[rope] for rope, _ in self._own]
            return [plain[number] for number in self._of_layer]
        scaled: dict[QueryScaleSpec | None, Tensor] = {
            scale: self._scaled(scale, positions.own) for scale in self._scales
        }
        angles = [_joined(rotated.get(rope), scaled.get(scale)) for rope, scale in self._own]
        return [angles[number] for number in self._of_layer]

    def _scaled(self, scale: QueryScaleSpec, positions: Tensor) -> Tensor:
        out = torch.empty(len(positions), dtype=torch.float32, device=positions.device)
        self._query_scales(positions, scale.growth, scale.length, scale.first, out)
        return out


def _joined(angles: Angles | None, query_scale: Tensor | None) -> Angles | None:
    if query_scale is None:
        return angles
    return Angles(None, None, query_scale) if angles is None else Angles(angles.cos, angles.sin, query_scale)


def build_rotary(rope: RopeSpec, head_dim: int, options: TensorOptions) -> Rotary:
    """Build the layer that turns positions into angles."""
    frequencies = frequencies_by_length(rope, head_dim, options.device) or rotary_frequencies(rope, head_dim)
    if rope.sections and isinstance(frequencies, Tensor):
        return AxialRotary(frequencies, angle_scale(rope), options, rope.axes)
    return Rotary(frequencies, angle_scale(rope), options)


def rotary_frequencies(rope: RopeSpec, head_dim: int, length: int = 0) -> Tensor:
    """Return scaled frequencies theta^(-2i/width), [width / 2] fp32, in radians a position, for a sequence of `length`
    tokens.
    """
    width, theta = rope.width(head_dim), rope.theta
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies = (-1.0 if rope.backward else 1.0) / theta**exponents
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case DynamicScaling():
            return _grown(rope, rope.scaling, width, torch.tensor([length]), reference.grow_frequencies)[0]
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling)
        case YarnScaling():
            return _yarn(frequencies, rope.scaling, theta, width)
        case ProportionalScaling(share, factor):
            kept = int(share * width // 2)
            return torch.cat((frequencies[:kept] / factor, torch.zeros(width // 2 - kept)))
        case FactorScaling(factors):
            return frequencies / torch.tensor(factors)
        case LongScaling():
            long = length > rope.scaling.original_max_len
            return frequencies / torch.tensor(rope.scaling.long_factors if long else rope.scaling.short_factors)


def frequencies_by_length(rope: RopeSpec, head_dim: int, device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """Return a function from lengths [tokens] to frequencies [tokens, width / 2]; None: they do not depend on the
    length.
    """
    scaling = rope.scaling
    if isinstance(scaling, LongScaling):
        original = scaling.original_max_len
        both = torch.stack([rotary_frequencies(rope, head_dim, n) for n in (original, original + 1)]).to(device)
        choose = kernel("choose_frequencies", device.type)

        def chosen(lengths: Tensor) -> Tensor:
            out = both.new_empty((len(lengths), both.shape[1]))
            choose(lengths, both, original, out)
            return out

        return chosen
    if isinstance(scaling, DynamicScaling):
        grow = kernel("grow_frequencies", device.type)
        return lambda lengths: _grown(rope, scaling, rope.width(head_dim), lengths, grow)
    return None


def angle_scale(rope: RopeSpec) -> float:
    """Return the factor of cosines and sines, which makes attention scores grow with the context."""
    return rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling | LongScaling) else 1.0


def _grown(rope: RopeSpec, scaling: DynamicScaling, width: int, lengths: Tensor, grow: Callable[..., None]) -> Tensor:
    """Return frequencies [n, width / 2] for lengths [n]; `grow` is the op grow_frequencies."""
    out = torch.empty((len(lengths), width // 2), dtype=torch.float32, device=lengths.device)
    grow(lengths, rope.theta, scaling.factor, scaling.original_max_len, out)
    return out


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide slow frequencies (long wavelengths) by the factor, keep fast ones, and blend linearly between."""
    turns = scaling.original_max_len * frequencies / (2 * math.pi)  # over the length the model was first trained on
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = (turns >= low).float() if high == low else ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor


def _yarn(frequencies: Tensor, scaling: YarnScaling, theta: float, width: int) -> Tensor:
    """Blend linearly between divided and kept frequencies (Peng et al. 2023, "YaRN", section 3.2).

    The ramp lies between the dimensions that turn `beta_slow` and `beta_fast` times in the original length.
    """

    def dimension(turns: float) -> float:
        return width * math.log(scaling.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    steps = torch.arange(width // 2, dtype=torch.float32)
    stretch = ((steps - low) / (high - low or 0.001)).clamp(0.0, 1.0)
    return stretch * frequencies / scaling.factor + (1.0 - stretch) * frequencies
