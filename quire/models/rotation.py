"""The rotary layer of a RopeSpec."""

from __future__ import annotations

from quire.layers.layer import Place
from quire.layers.rotary import Rotary
from quire.models.frequencies import angle_scale, frequencies_by_length, rotary_frequencies
from quire.models.rope_spec import RopeSpec


def build_rotary(rope: RopeSpec, head_dim: int, place: Place) -> Rotary:
    """What turns positions into angles."""
    frequencies = frequencies_by_length(rope, head_dim, place.device) or rotary_frequencies(rope, head_dim)
    return Rotary(frequencies, angle_scale(rope), place)
