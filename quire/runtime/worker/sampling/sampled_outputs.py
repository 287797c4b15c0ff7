"""What sampling leaves: tokens, and faults that say why a position has none; and their way to the step's result.

Knows nothing about plans or how tokens are sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.sample import NOTHING_LEFT
from quire.foundation.messages.workers import Result, TokenLogprobs
from quire.runtime.worker.buffer_ring import BufferRing, PinnedBuffers

_ALIGNED = 16
"""Bytes to a multiple of which columns are aligned, as tensors of torch are at least."""
TRANSFORMED_UNSOUND = NOTHING_LEFT + 1
"""A fault that logits transforms made; the op knows nothing of them."""
UNSOUND_TEXT = "The model's output was not a number; this happens with broken weights or an overflow of the dtype."
_TRANSFORMED_TEXT = (
    "The model's output was sound, but this request's own rules (logits processors, penalties, logit_bias) made NaN or "
    "+inf of it; a processor forbids a token by -inf."
)
NOTHING_LEFT_TEXT = (
    "No token is left to draw: allowed_token_ids, bad_words, logit_bias, min_tokens and the grammar of a structured "
    "output forbid all of them."
)
REFUSALS = frozenset((NOTHING_LEFT_TEXT,))
"""Errors for which what the request asks for is to blame."""


class SampledOutputs:
    """A column of tokens and one of faults, side by side, so that one copy takes both to the host. They keep their
    addresses, so that captured graphs can write them.

    Args:
        most: Sampled positions of a step, at most.
        ring: Of the host's buffers; on a CPU there is one, into which tokens are sampled.

    Attributes:
        tokens: [most] int64.
        faults: [most] int8; see the op `sample`.
    """

    def __init__(self, most: int, ring: BufferRing) -> None:
        self._ring = ring
        faults_at = -(-8 * most // _ALIGNED) * _ALIGNED  # bytes
        self._buffers = PinnedBuffers(ring, -(-(faults_at + most) // 8))
        self._words = self._buffers.host[0]
        if ring.has_device_memory:
            self._words = torch.zeros(self._words.shape, dtype=torch.int64, device=ring.device)
            self._copy = kernel("copy_outputs_to_host", ring.device.type)
        whole = self._words.view(torch.uint8)
        self.tokens: Tensor = whole[: 8 * most].view(torch.int64)
        self.faults: Tensor = whole[faults_at : faults_at + most].view(torch.int8)
        arrays = [host.view(torch.uint8).numpy() for host in self._buffers.host]
        self._on_host = [(a[: 8 * most].view(np.int64), a[faults_at : faults_at + most].view(np.int8)) for a in arrays]

    def send(self) -> None:
        """Launch the copy to the host; a later one in the same step replaces it."""
        if self._ring.has_device_memory:
            self._copy(self._words, self._buffers.device_view, self._ring.device_steps)

    def on_host(self) -> tuple[IntArray, npt.NDArray[np.int8]]:
        """Tokens and faults of the step that was staged last. Their values are there once the stream has come so far,
        and until the ring comes back to the step's buffer.
        """
        return self._on_host[self._ring.current]


@dataclass(frozen=True)
class Sampled:
    """What was sampled.

    Attributes:
        tokens: [sampled] int64; the token of a position that failed means nothing.
        faults: [sampled] int8; see the op `sample`, and TRANSFORMED_UNSOUND.
        broken: What went wrong in logits processors, by position.
        scores: [sampled, vocab] what the tokens were sampled from; None unless asked for.
        transformed: The positions whose logits were changed.
    """

    tokens: Tensor
    faults: Tensor
    broken: Mapping[int, str]
    scores: Tensor | None
    transformed: Set[int] = frozenset()


def errors_of(
    faults: npt.NDArray[np.int8], broken: Mapping[int, str] | None = None, transformed: Set[int] = frozenset()
) -> dict[int, str]:
    """The positions that failed, and why; see Sampled."""
    if not broken and not faults.any():
        return {}
    found = {place: _text(fault, place in transformed) for place, fault in enumerate(faults.tolist()) if fault}
    return dict(sorted((found | dict(broken or {})).items()))


def _text(fault: int, transformed: bool) -> str:
    if fault == TRANSFORMED_UNSOUND:
        return _TRANSFORMED_TEXT
    return NOTHING_LEFT_TEXT if fault == NOTHING_LEFT and transformed else UNSOUND_TEXT


def result_of_tokens(
    step: int,
    tokens: list[int],
    errors: Mapping[int, str],
    logprobs: list[TokenLogprobs | None],
    prompt_logprobs: list[list[TokenLogprobs]],
    device_ms: float,
) -> Result:
    """The step's columns. A sampled position that failed is an error, and gains no token."""
    counts = [1] * len(tokens)
    if errors:
        counts = [int(place not in errors) for place in range(len(tokens))]
        tokens = [token for place, token in enumerate(tokens) if place not in errors]
        logprobs = [entry for place, entry in enumerate(logprobs) if place not in errors]
    refused = [place for place, text in errors.items() if text in REFUSALS]
    return Result(step, counts, tokens, logprobs, list(errors.items()), device_ms, prompt_logprobs, refused=refused)
