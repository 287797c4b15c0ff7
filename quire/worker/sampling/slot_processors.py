"""The operator's logits processors at work: for each slot that has any, what they are and the tokens they look at.

What goes wrong in one fails its own request and no other. They look at tokens on the host, so a step with a slot that
has any waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import RequestError
from quire.logits_processors import LogitsProcessor, RequestProcessor
from quire.messages import Admitted


class SlotProcessors:
    """The processors of the slots that have any, and the tokens they look at."""

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = processors
        self._chains: dict[int, list[RequestProcessor]] = {}
        self._refused: dict[int, str] = {}
        self._tokens: dict[int, tuple[list[int], list[int]]] = {}  # prompt, output

    def admit(self, owner: Admitted) -> bool:
        """A slot's new owner; whether any processor takes it."""
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
        return self.concerns(slot)

    def concerns(self, slot: int) -> bool:
        """Whether a processor takes the slot, or failed to."""
        return slot in self._chains or slot in self._refused

    def apply(self, logits: Tensor, asking: Sequence[tuple[int, int]]) -> dict[int, str]:
        """Change logits [reads, vocab] fp32 in place; `asking` are (read, slot). Returns what went wrong, by read."""
        errors: dict[int, str] = {}
        for read, slot in asking:
            if slot in self._refused:
                errors[read] = self._refused[slot]
            elif slot in self._chains:
                try:
                    for process in self._chains[slot]:
                        logits[read] = _checked(process(*self._tokens[slot], logits[read]), logits[read])
                except Exception as error:
                    errors[read] = _cause(error)
        return errors

    def drew(self, tokens: Tensor, asking: Sequence[tuple[int, int]]) -> None:
        """Remember what each read drew; `tokens` [reads] int64."""
        for read, slot in asking:
            if slot in self._tokens:
                self._tokens[slot][1].append(int(tokens[read]))


def _checked(changed: Tensor, before: Tensor) -> Tensor:
    if not isinstance(changed, torch.Tensor) or changed.shape != before.shape:
        raise TypeError(f"it must return logits of shape {tuple(before.shape)}")
    return changed


def _cause(error: Exception) -> str:
    text = error.message if isinstance(error, RequestError) else f"{type(error).__name__}: {error}"
    return f"A logits processor failed: {text[:200]}"
