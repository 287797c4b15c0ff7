"""Samples to log-mel features, as Whisper hears them (Radford et al. 2022, "Robust Speech Recognition via Large-Scale
Weak Supervision", section 2.2).

Features are those of transformers' WhisperFeatureExtractor within 1e-5.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from quire.models.audio.audio_spec import MelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

_MAX_HZ = 8_000.0
_LEAST_POWER = 1e-10
_RANGE = 8.0
"""Powers of ten below the loudest that features tell apart."""
_LINEAR_HZ, _LOG_FROM_HZ, _LOG_FROM_MEL, _LOG_STEP = 200 / 3, 1_000.0, 15.0, math.log(6.4) / 27
"""Slaney's scale: 200/3 Hz a mel up to 1,000 Hz, and then 27 mels for each factor of 6.4."""
_FRAMES_AT_ONCE = 3_000


class LogMel:
    """Makes features of samples.

    Args:
        spec: Sizes of windows, and the number of mels.
    """

    def __init__(self, spec: MelSpec) -> None:
        self._spec = spec

    def __call__(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Compute features: samples [n] → [mels, n // hop] float32. All features depend on the loudest of them."""
        spec, half = self._spec, self._spec.window // 2
        padded = np.pad(samples, half, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, spec.window)[:: spec.hop][: len(samples) // spec.hop]
        made = [self._mels(frames[at : at + _FRAMES_AT_ONCE]) for at in range(0, len(frames), _FRAMES_AT_ONCE)]
        logs = np.log10(np.maximum(np.concatenate(made), _LEAST_POWER))
        features = (np.maximum(logs, logs.max() - _RANGE) + 4.0) / 4.0
        return np.ascontiguousarray(features.T, dtype=np.float32)

    def _mels(self, frames: NDArray[np.float32]) -> Numbers:
        spectrum = np.fft.rfft(frames * self._window, axis=1)
        powers: Numbers = (spectrum.real**2 + spectrum.imag**2) @ self._filters
        return powers

    @cached_property
    def _window(self) -> Numbers:
        turns: Numbers = np.arange(self._spec.window) / self._spec.window
        return 0.5 - 0.5 * np.cos(2 * np.pi * turns)

    @cached_property
    def _filters(self) -> Numbers:
        """Triangles over frequencies, [window // 2 + 1, mels], each of the same area (Slaney's)."""
        spec = self._spec
        bins = np.linspace(0, spec.rate / 2, spec.window // 2 + 1)
        corners = _hertz(np.linspace(0, _mel(_MAX_HZ), spec.mels + 2))
        widths = np.diff(corners)
        slopes = corners[None] - bins[:, None]
        rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
        triangles: Numbers = np.maximum(0, np.minimum(rising, falling)) * (2 / (corners[2:] - corners[:-2]))
        return triangles


def _mel(hertz: float) -> float:
    if hertz < _LOG_FROM_HZ:
        return hertz / _LINEAR_HZ
    return _LOG_FROM_MEL + math.log(hertz / _LOG_FROM_HZ) / _LOG_STEP


def _hertz(mels: Numbers) -> Numbers:
    found: Numbers = np.where(
        mels < _LOG_FROM_MEL, mels * _LINEAR_HZ, _LOG_FROM_HZ * np.exp(_LOG_STEP * (mels - _LOG_FROM_MEL))
    )
    return found
