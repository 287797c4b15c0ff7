"""Everything that changes logits before a token is sampled, for the slots that ask for it; other slots cost one lookup.

The order is vLLM's: allowed tokens, bad words, stop tokens before min_tokens, logit_bias (`token_rules.py`), then the
rules of transcripts (`transcript_tokens.py`), the operator's logits processors, and penalties.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.penalties import IN_PROMPT, ONE_MORE
from quire.errors import RequestError
from quire.foundation.messages.workers import Admitted
from quire.logits_processors import LogitsProcessor, RequestProcessor
from quire.runtime.worker.host_memory import lazy_zeros, upload
from quire.runtime.worker.sampling.token_rules import ActiveRows, AllowedTokens, BadWords, LogitBias
from quire.runtime.worker.sampling.transcript_tokens import TranscriptTokens
from quire.sampling_params import LARGEST_EFFECT


class LogitsTransforms:
    """The transforms of all slots."""

    def __init__(
        self, slots: int, vocab_size: int, device: torch.device, processors: Sequence[LogitsProcessor] = ()
    ) -> None:
        self._asked = np.zeros(slots, dtype=np.int8)  # by how many transforms each slot's logits are changed
        self._allowed = AllowedTokens(slots, vocab_size, device)
        self._bias = LogitBias(device)
        self._bad_words = BadWords(device)
        self._transcripts = TranscriptTokens(device)
        self._processors = SlotProcessors(processors)
        self._penalties = Penalties(slots, vocab_size, device)
        self._all = (
            self._allowed, self._bad_words, self._bias, self._transcripts, self._processors, self._penalties,
        )  # fmt: skip

    def admit(self, owner: Admitted) -> None:
        """Register a slot's new owner."""
        self._asked[owner.slot] = sum(transform.admit(owner) for transform in self._all)  # each must hear of it

    def any_active(self, slots: IntArray) -> bool:
        """Whether the logits of any of these slots are changed."""
        return bool(self._asked[slots].any())

    def are_active(self, slots: IntArray) -> npt.NDArray[np.bool_]:
        """Return whether the logits of each of these slots are changed, [slots]."""
        active: npt.NDArray[np.bool_] = self._asked[slots] > 0
        return active

    def active_rows(self, sampled_slots: IntArray) -> ActiveRows:
        """Return the rows of these slots' logits that are changed."""
        asked = self._asked[sampled_slots]
        if not asked.any():
            return ()
        rows = asked.nonzero()[0]
        return list(zip(rows.tolist(), sampled_slots[rows].tolist(), strict=True))

    def apply(self, logits: Tensor, active: ActiveRows) -> dict[int, str]:
        """Change logits [sampled, vocab] fp32 in place; returns errors of logits processors by row."""
        self._allowed.apply(logits, active)
        self._bad_words.apply(logits, active)
        for slot in self._bias.apply(logits, active):
            self._asked[slot] -= 1
        self._transcripts.apply(logits, active)
        errors = self._processors.apply(logits, active)
        self._penalties.apply(logits, active)
        return errors

    def record_tokens(self, tokens: Tensor, active: ActiveRows) -> None:
        """Note the sampled `tokens`, [sampled] int64."""
        self._bad_words.record_tokens(tokens, active)
        self._transcripts.record_tokens(tokens, active)
        self._processors.record_tokens(tokens, active)
        self._penalties.record_tokens(tokens, active)

    def warm_up(self, logits: Tensor) -> None:
        """Run the kernels of transforms on unused logits [sampled, vocab] fp32, with the memory that they take at
        most."""
        self._allowed.warm_up(logits)
        self._penalties.warm_up(logits)


class SlotProcessors:
    """Runs the operator's logits processors for the slots that use any.

    A processor that raises an exception fails only its own request. Processors receive tokens on the host, so a step
    with such a slot waits for the device.
    """

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = processors
        self._chains: dict[int, list[RequestProcessor]] = {}
        self._refused: dict[int, str] = {}
        self._tokens: dict[int, tuple[list[int], list[int]]] = {}  # prompt, output

    def admit(self, owner: Admitted) -> bool:
        """Register a slot's new owner; returns whether a processor accepts it, or failed to decide."""
        slot = owner.slot
        for of_slot in (self._chains, self._refused, self._tokens):
            of_slot.pop(slot, None)
        if not self._processors:
            return False
        try:
            chain = [found for each in self._processors if (found := each.for_request(owner.sampling)) is not None]
        except Exception as error:
            chain, self._refused[slot] = [], _cause(error)
        if chain:
            self._chains[slot] = chain
            self._tokens[slot] = owner.history[: owner.prompt_len], owner.history[owner.prompt_len :]
        return slot in self._chains or slot in self._refused

    def apply(self, logits: Tensor, active: ActiveRows) -> dict[int, str]:
        """Change logits [sampled, vocab] fp32 in place; returns errors by row."""
        errors: dict[int, str] = {}
        for row, slot in active:
            if slot in self._refused:
                errors[row] = self._refused[slot]
            elif slot in self._chains:
                try:
                    for process in self._chains[slot]:
                        logits[row] = _checked(process(*self._tokens[slot], logits[row]), logits[row])
                except Exception as error:
                    errors[row] = _cause(error)
        return errors

    def record_tokens(self, tokens: Tensor, active: ActiveRows) -> None:
        """Append the sampled `tokens`, [sampled] int64, to their outputs."""
        for row, slot in active:
            if slot in self._tokens:
                self._tokens[slot][1].append(int(tokens[row]))


def _checked(changed: Tensor, before: Tensor) -> Tensor:
    if not isinstance(changed, torch.Tensor) or changed.shape != before.shape:
        raise TypeError(f"it must return logits of shape {tuple(before.shape)}")
    return changed


def _cause(error: Exception) -> str:
    text = error.message if isinstance(error, RequestError) else f"{type(error).__name__}: {error}"
    return f"A logits processor failed: {text[:200]}"


class Penalties:
    """Presence, frequency and repetition penalties, and the token counts of each slot's sequence that they need.

    The device counts the tokens that it samples, so no step waits for the host. Each slot has a row of counts from the
    start, 4 bytes per token of the vocabulary, so that memory never runs out later: 256 slots of 128,256 tokens take
    132 MB. On a CPU only written rows take memory.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._apply_penalties = kernel("apply_penalties", device.type)
        self._count_sampled = kernel("count_sampled", device.type)
        self._active: set[int] = set()
        self._seen = lazy_zeros((slots, vocab_size), torch.int32, device)  # see the op `apply_penalties`
        self._weights = torch.zeros((slots, 3), device=device)  # presence, frequency, repetition

    def admit(self, owner: Admitted) -> bool:
        """Register a slot's new owner; returns whether it uses penalties."""
        slot, asked = owner.slot, owner.sampling
        self._active.discard(slot)
        if not asked.penalizes:
            return False
        self._active.add(slot)
        repetition = max(1 / LARGEST_EFFECT, min(LARGEST_EFFECT, asked.repetition_penalty))
        weights = (asked.presence_penalty, asked.frequency_penalty, repetition)
        self._weights[slot].copy_(upload(weights, self._device, torch.float32))
        history = upload(owner.history, self._device)
        prompt, output = history[: owner.prompt_len], history[owner.prompt_len :]
        seen = self._seen[slot].zero_().index_fill_(0, prompt, IN_PROMPT)
        seen.index_add_(0, output, torch.full_like(output, ONE_MORE, dtype=torch.int32))
        return True

    def apply(self, logits: Tensor, active: ActiveRows) -> None:
        """Change logits [sampled, vocab] fp32 in place."""
        if own := self._own(active):
            self._apply_penalties(logits, *upload(own, self._device), self._seen, self._weights)

    def record_tokens(self, tokens: Tensor, active: ActiveRows) -> None:
        """Count the sampled `tokens`, [sampled] int64."""
        if own := self._own(active):  # a slot has one row of a step at most, so no row of counts comes twice
            self._count_sampled(tokens, *upload(own, self._device), self._seen)

    def warm_up(self, logits: Tensor) -> None:
        first = upload([[0], [0]], self._device)
        seen, weights = self._seen.new_zeros((1, logits.shape[-1])), self._weights.new_ones((1, 3))
        self._apply_penalties(logits, *first, seen, weights)
        self._count_sampled(first[0], *first, seen)

    def _own(self, active: ActiveRows) -> list[list[int]]:
        """Return the rows and slots with penalties, as two lists; an empty list if there are none."""
        own = [(row, slot) for row, slot in active if slot in self._active]
        return [list(column) for column in zip(*own, strict=True)]
