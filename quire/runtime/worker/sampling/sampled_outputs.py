"""Sampled tokens, faults that say why a position has no token, and their way to the step's result."""

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
"""Alignment of columns in bytes, which torch's tensors have at least."""
TRANSFORMED_UNSOUND = NOTHING_LEFT + 1
"""Fault of a position where logits transforms made NaN or +inf. The op `sample` does not know it."""
UNSOUND_TEXT = "The model's output was not a number; this happens with broken weights or an overflow of the dtype."
_TRANSFORMED_TEXT = (
    "The model's output was sound, but this request's own rules (logits processors, penalties, logit_bias) made NaN or "
    "+inf of it; a processor forbids a token by -inf."
)
NOTHING_LEFT_TEXT = (  # the only error that a request itself causes
    "No token is left to draw: allowed_token_ids, bad_words, logit_bias, min_tokens and the grammar of a structured "
    "output forbid all of them."
)


class SampledOutputs:
    """Adjacent columns of tokens and faults, which one copy takes to the host. Their addresses are fixed, so that
    captured graphs can write them. On a CPU the ring has one buffer, which receives the tokens directly.

    Attributes:
        tokens: [most] int64.
        faults: [most] int8, fault codes of the op `sample`.
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
        """Launch the copy to the host. A later copy in the same step replaces it."""
        if self._ring.has_device_memory:
            self._copy(self._words, self._buffers.device_view, self._ring.device_steps)

    def on_host(self) -> tuple[IntArray, npt.NDArray[np.int8]]:
        """Return the host's tokens and faults of the last staged step. They are valid from when the device has run the
        copy until the ring reuses the buffer."""
        return self._on_host[self._ring.current]


@dataclass(frozen=True)
class Sampled:
    """What was sampled.

    Attributes:
        tokens: [sampled] int64; the token of a failed position is meaningless.
        faults: [sampled] int8, fault codes of the op `sample`, or TRANSFORMED_UNSOUND.
        broken: Errors of logits processors, by position.
        scores: [sampled, vocab], the scores that tokens were sampled from; None if not asked for.
        transformed: Positions whose logits were changed.
    """

    tokens: Tensor
    faults: Tensor
    broken: Mapping[int, str]
    scores: Tensor | None
    transformed: Set[int] = frozenset()


def errors_of(
    faults: npt.NDArray[np.int8], broken: Mapping[int, str] | None = None, transformed: Set[int] = frozenset()
) -> dict[int, str]:
    """Return the error text of each failed position. `faults`, `broken` and `transformed` are those of Sampled."""
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
    """Build the Result of a step. A sampled position that failed is an error and gains no token."""
    counts = [1] * len(tokens)
    if errors:
        counts = [int(place not in errors) for place in range(len(tokens))]
        tokens = [token for place, token in enumerate(tokens) if place not in errors]
        logprobs = [entry for place, entry in enumerate(logprobs) if place not in errors]
    refused = [place for place, text in errors.items() if text == NOTHING_LEFT_TEXT]
    return Result(step, counts, tokens, logprobs, list(errors.items()), device_ms, prompt_logprobs, refused=refused)
