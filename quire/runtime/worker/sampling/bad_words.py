"""`bad_words`: sequences of tokens that an output never gets, for the slots that ask.

Where the output ends with all tokens of a sequence but the last, the last is forbidden. The device keeps the ends of
outputs, so no step waits for the host to learn a token. Knows nothing about text.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.foundation.messages.workers import Admitted
from quire.runtime.worker.host_memory import upload
from quire.runtime.worker.sampling.active_rows import ActiveRows, flat_index

_ANY = -1
"""In a prefix: any token."""
_NONE = -2
"""In an end: no token yet."""


class _Words(NamedTuple):
    """The bad words of one slot.

    Attributes:
        prefixes: [words, width] int32, each word without its last token, padded with _ANY at the front.
        last: [words] int64, each word's last token.
        end: [width] int32, the output's last tokens.
    """

    prefixes: Tensor
    last: Tensor
    end: Tensor


class BadWords:
    """Forbids bad words for the slots that ask for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._words: dict[int, _Words] = {}

    def admit(self, owner: Admitted) -> bool:
        """Take a slot's new owner; returns whether it asks for any of this."""
        self._words.pop(owner.slot, None)
        if not owner.bad_words:
            return False
        width = max(len(word) for word in owner.bad_words) - 1
        prefixes = [[_ANY] * (width - len(word) + 1) + word[:-1] for word in owner.bad_words]
        output = owner.history[owner.prompt_len :]
        end = [*[_NONE] * width, *output][len(output) :]
        self._words[owner.slot] = _Words(
            upload(prefixes, self._device, torch.int32).view(len(prefixes), width),
            upload([w[-1] for w in owner.bad_words], self._device),
            upload(end, self._device, torch.int32),
        )
        return True

    def is_active(self, slot: int) -> bool:
        """Whether the slot has any."""
        return slot in self._words

    def apply(self, logits: Tensor, active: ActiveRows) -> None:
        """Change logits [sampled, vocab] fp32 in place."""
        ours = [(row, self._words[slot]) for row, slot in active if slot in self._words]
        if not ours:
            return
        # Added, because two words may end with the same token: the one that does not match adds 0.
        costs = [
            torch.zeros(len(words.last), device=self._device).masked_fill_(_matches(words), float("-inf"))
            for _, words in ours
        ]
        logits.view(-1).index_add_(0, flat_index(logits, [(row, words.last) for row, words in ours]), torch.cat(costs))

    def record_tokens(self, tokens: Tensor, active: ActiveRows) -> None:
        """Append the sampled `tokens`, [sampled] int64, to their outputs' ends."""
        for row, slot in active:
            words = self._words.get(slot)
            if words is not None and len(words.end):
                words.end.copy_(torch.cat((words.end[1:], tokens[row : row + 1])))


def _matches(words: _Words) -> Tensor:
    """Whether the output ends with each prefix, [words]."""
    return ((words.prefixes == words.end) | (words.prefixes == _ANY)).all(-1)
