"""Rules of transcripts' tokens: some are never sampled, and timestamps stand in pairs and do not decrease."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.foundation.messages.to_engine import TimestampRules, TranscriptRules
from quire.foundation.messages.workers import Admitted
from quire.runtime.worker.host_memory import upload
from quire.runtime.worker.sampling.token_rules import ActiveRows

_MINUS_INFINITY = float("-inf")


class TranscriptTokens:
    """The rules of the slots that transcribe. What was sampled is kept on the host, so a step with such a slot waits
    for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[int, _Transcript] = {}

    def admit(self, owner: Admitted) -> bool:
        """Register a slot's new owner; returns whether it transcribes."""
        self._slots.pop(owner.slot, None)
        if owner.transcript is None:
            return False
        self._slots[owner.slot] = _Transcript(owner.transcript, owner.history[owner.prompt_len :], self._device)
        return True

    def apply(self, logits: Tensor, active: ActiveRows) -> None:
        """Change logits [sampled, vocab] fp32 in place."""
        for row, slot in active:
            if slot in self._slots:
                self._slots[slot].restrict(logits[row])

    def record_tokens(self, tokens: Tensor, active: ActiveRows) -> None:
        """Note the sampled `tokens`, [sampled] int64."""
        for row, slot in active:
            if slot in self._slots:
                self._slots[slot].output.append(int(tokens[row]))


class _Transcript:
    """One slot's rules and output."""

    def __init__(self, rules: TranscriptRules, output: list[int], device: torch.device) -> None:
        self.output = list(output)
        self._timestamps = rules.timestamps
        self._never = upload(rules.never, device)
        self._not_first = upload(rules.not_first, device)

    def restrict(self, scores: Tensor) -> None:
        """Change the scores [vocab] of the next token in place."""
        scores.index_fill_(0, self._never, _MINUS_INFINITY)
        if not self.output:
            scores.index_fill_(0, self._not_first, _MINUS_INFINITY)
        if self._timestamps is not None:
            self._restrict_timestamps(scores, self._timestamps)

    def _restrict_timestamps(self, scores: Tensor, rules: TimestampRules) -> None:
        """Bar what may not follow. If timestamps together are likelier than any text, only they may."""
        begin, output = rules.begin, self.output
        scores[rules.barred] = _MINUS_INFINITY
        is_behind = bool(output) and output[-1] >= begin
        is_paired = len(output) < 2 or output[-2] >= begin
        if is_behind and is_paired:
            scores[begin:] = _MINUS_INFINITY
        elif is_behind:
            scores[: rules.end] = _MINUS_INFINITY
        if (last := next((token for token in reversed(output) if token >= begin), None)) is not None:
            scores[begin : last if is_behind and not is_paired else last + 1] = _MINUS_INFINITY
        if not output:
            scores[:begin] = _MINUS_INFINITY
            if rules.latest is not None:
                scores[rules.latest + 1 :] = _MINUS_INFINITY
        if scores[begin:].logsumexp(0) > scores[:begin].max():
            scores[:begin] = _MINUS_INFINITY
