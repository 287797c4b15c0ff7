"""The operator's logits processors: for each slot that has any, the processors and the tokens that they are given.

A processor that raises fails its own request and no other. Tokens are given to it on the host, so a step with such a
slot waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import RequestError
from quire.foundation.messages.workers import Admitted
from quire.logits_processors import LogitsProcessor, RequestProcessor
from quire.runtime.worker.sampling.token_rules import ActiveRows


class SlotProcessors:
    """Runs custom logits processors for the slots that have any."""

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = processors
        self._chains: dict[int, list[RequestProcessor]] = {}
        self._refused: dict[int, str] = {}
        self._tokens: dict[int, tuple[list[int], list[int]]] = {}  # prompt, output

    def admit(self, owner: Admitted) -> bool:
        """Take a slot's new owner; returns whether a processor takes it, or failed to."""
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
        """Change logits [sampled, vocab] fp32 in place. Returns what went wrong, by row."""
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
