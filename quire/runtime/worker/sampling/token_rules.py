"""Rules about single tokens, for the slots that ask for them: `allowed_token_ids`, `bad_words`, `logit_bias`, and no
stop token before `min_tokens`.

A few operations change all active rows of a step. State that depends on the output is kept on the device, so no step
waits for the host to learn a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.foundation.messages.workers import Admitted
from quire.runtime.worker.host_memory import upload
from quire.sampling_params import LARGEST_EFFECT

ActiveRows = Sequence[tuple[int, int]]
"""(row of the logits, slot) for each row whose slot has any transform."""
MAX_LOGITS = 2**24
"""Maximum logits that are changed at a time, though never less than one row. Each takes about 7 bytes meanwhile."""
_ANY = -1
"""In a prefix: any token."""
_NONE = -2
"""In an end: no token yet."""
_MINUS_INFINITY = float("-inf")


class AllowedTokens:
    """`allowed_token_ids`: forbids all tokens but the allowed ones, for the slots that ask for it.

    Each slot has a bit for each token of the vocabulary from the start, so that memory never runs out later: 512 slots
    of 128,256 tokens take 8 MB, while lists of all ids would take 525 MB.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._active: set[int] = set()
        self._bits = torch.zeros((slots, -(-vocab_size // 8)), dtype=torch.uint8, device=device)
        self._places = torch.arange(8, dtype=torch.uint8, device=device)  # of a byte's bits, the lowest first
        self._rows = max(1, MAX_LOGITS // vocab_size)

    def admit(self, owner: Admitted) -> bool:
        """Register a slot's new owner; returns whether it uses this rule."""
        self._active.discard(owner.slot)
        ids = owner.sampling.allowed_token_ids
        if not ids:
            return False
        self._active.add(owner.slot)
        allowed = np.zeros(self._bits.shape[1] * 8, dtype=np.bool_)
        allowed[ids] = True
        self._bits[owner.slot].copy_(upload(np.packbits(allowed, bitorder="little"), self._device, torch.uint8))
        return True

    def apply(self, logits: Tensor, active: ActiveRows) -> None:
        """Change logits [sampled, vocab] fp32 in place."""
        own = [pair for pair in active if pair[1] in self._active]
        for at in range(0, len(own), self._rows):
            self._allow(logits, own[at : at + self._rows])

    def warm_up(self, logits: Tensor) -> None:
        """Take the maximum memory of `apply`, on unused logits [sampled, vocab] fp32."""
        self._allow(logits, [(row, 0) for row in range(min(len(logits), self._rows))])

    def _allow(self, logits: Tensor, active: ActiveRows) -> None:
        rows, slots = upload(active, self._device).unbind(1)
        bits = self._bits.index_select(0, slots).unsqueeze(-1)  # [n, bytes, 1]
        forbidden = bits.bitwise_right_shift(self._places).bitwise_and_(1).logical_not().flatten(1)  # [n, bytes · 8]
        own = logits.index_select(0, rows).masked_fill_(forbidden[:, : logits.shape[1]], float("-inf"))
        logits.index_copy_(0, rows, own)


class _Words(NamedTuple):
    """The bad words of one slot.

    Attributes:
        prefixes: [words, width] int32, each word without its last token, padded with _ANY in front.
        last: [words] int64, each word's last token.
        end: [width] int32, the last tokens of the output.
    """

    prefixes: Tensor
    last: Tensor
    end: Tensor


class BadWords:
    """`bad_words`: sequences of tokens that an output never contains, for the slots that ask for it.

    If the output ends with all tokens of a sequence but the last, the last one is forbidden. The device keeps the ends
    of outputs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._words: dict[int, _Words] = {}

    def admit(self, owner: Admitted) -> bool:
        """Register a slot's new owner; returns whether it uses this rule."""
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
        """Append the sampled `tokens`, [sampled] int64, to the ends of their outputs."""
        for row, slot in active:
            words = self._words.get(slot)
            if words is not None and len(words.end):
                words.end.copy_(torch.cat((words.end[1:], tokens[row : row + 1])))


def _matches(words: _Words) -> Tensor:
    """Whether the output ends with each prefix, [words]."""
    return ((words.prefixes == words.end) | (words.prefixes == _ANY)).all(-1)


@dataclass
class Forbidden:
    """Tokens that a slot may not sample for the next `steps` tokens; `token_ids` is [n] int64."""

    token_ids: Tensor
    steps: int


class LogitBias:
    """`logit_bias`, and no stop token before `min_tokens`, for the slots that ask for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._forbidden: dict[int, Forbidden] = {}
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}

    def admit(self, owner: Admitted) -> bool:
        """Register a slot's new owner; returns whether it uses these rules."""
        slot, sampling = owner.slot, owner.sampling
        for by_slot in (self._forbidden, self._bias):
            by_slot.pop(slot, None)
        if owner.num_sampled < sampling.min_tokens and owner.stop_ids:
            self._forbidden[slot] = Forbidden(self._ids(owner.stop_ids), sampling.min_tokens - owner.num_sampled)
        if sampling.logit_bias:
            values = [max(-LARGEST_EFFECT, min(LARGEST_EFFECT, value)) for value in sampling.logit_bias.values()]
            self._bias[slot] = self._ids(list(sampling.logit_bias)), upload(values, self._device, torch.float32)
        return slot in self._forbidden or slot in self._bias

    def apply(self, logits: Tensor, active: ActiveRows) -> list[int]:
        """Change logits [sampled, vocab] fp32 in place; returns the slots whose logits no longer change from now on."""
        forbidding = [(row, slot, self._forbidden[slot]) for row, slot in active if slot in self._forbidden]
        if forbidding:
            where = flat_index(logits, [(row, forbidden.token_ids) for row, _, forbidden in forbidding])
            logits.view(-1).index_fill_(0, where, _MINUS_INFINITY)
        biased = [(row, *self._bias[slot]) for row, slot in active if slot in self._bias]
        if biased:
            where = flat_index(logits, [(row, ids) for row, ids, _ in biased])
            logits.view(-1).index_add_(0, where, torch.cat([values for _, _, values in biased]))
        ended = []
        for _, slot, forbidden in forbidding:
            forbidden.steps -= 1
            if forbidden.steps == 0:
                del self._forbidden[slot]
                if slot not in self._bias:
                    ended.append(slot)
        return ended

    def _ids(self, values: Sequence[int]) -> Tensor:
        return upload(values, self._device)


def flat_index(logits: Tensor, tokens: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Return the indices into flattened logits [sampled · vocab] of all (row, token ids [n]) pairs."""
    counts = [len(ids) for _, ids in tokens]
    starts = np.repeat(np.array([row for row, _ in tokens], dtype=np.int64), counts) * logits.shape[-1]
    return torch.cat([ids for _, ids in tokens]).add_(upload(starts, logits.device))
