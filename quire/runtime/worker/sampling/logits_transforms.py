"""All that changes logits before a token is sampled, for the slots that ask for it; for others, one look at a column.

The order is vLLM's: allowed tokens, bad words, stop tokens before min_tokens, logit_bias, logits processors, penalties.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.foundation.messages.workers import Admitted
from quire.logits_processors import LogitsProcessor
from quire.runtime.worker.sampling.penalties import Penalties
from quire.runtime.worker.sampling.slot_processors import SlotProcessors
from quire.runtime.worker.sampling.token_rules import ActiveRows, AllowedTokens, BadWords, LogitBias


class LogitsTransforms:
    """The transforms of all slots.

    Args:
        slots: Number of slots.
        vocab_size: Of the logits.
        device: Of the logits.
        processors: The operator's logits processors.
    """

    def __init__(
        self, slots: int, vocab_size: int, device: torch.device, processors: Sequence[LogitsProcessor] = ()
    ) -> None:
        self._asked = np.zeros(slots, dtype=np.int8)  # by how many transforms each slot's logits are changed
        self._allowed = AllowedTokens(slots, vocab_size, device)
        self._bias = LogitBias(device)
        self._bad_words = BadWords(device)
        self._processors = SlotProcessors(processors)
        self._penalties = Penalties(slots, vocab_size, device)
        self._all = (self._allowed, self._bad_words, self._bias, self._processors, self._penalties)

    def admit(self, owner: Admitted) -> None:
        """Take a slot's new owner."""
        self._asked[owner.slot] = sum(transform.admit(owner) for transform in self._all)  # each must hear of it

    def any_active(self, slots: IntArray) -> bool:
        """Whether any of these slots' logits are changed."""
        return bool(self._asked[slots].any())

    def are_active(self, slots: IntArray) -> npt.NDArray[np.bool_]:
        """Whether each slot's logits are changed, [slots]."""
        active: npt.NDArray[np.bool_] = self._asked[slots] > 0
        return active

    def active_rows(self, sampled_slots: IntArray) -> ActiveRows:
        """Which rows of the logits of these slots are changed."""
        asked = self._asked[sampled_slots]
        if not asked.any():
            return ()
        rows = asked.nonzero()[0]
        return list(zip(rows.tolist(), sampled_slots[rows].tolist(), strict=True))

    def apply(self, logits: Tensor, active: ActiveRows) -> dict[int, str]:
        """Change logits [sampled, vocab] fp32 in place. Returns what went wrong, by row."""
        self._allowed.apply(logits, active)
        self._bad_words.apply(logits, active)
        for slot in self._bias.apply(logits, active):
            self._asked[slot] -= 1
        errors = self._processors.apply(logits, active)
        self._penalties.apply(logits, active)
        return errors

    def record_tokens(self, tokens: Tensor, active: ActiveRows) -> None:
        """Take note of the sampled `tokens`, [sampled] int64."""
        self._bad_words.record_tokens(tokens, active)
        self._processors.record_tokens(tokens, active)
        self._penalties.record_tokens(tokens, active)

    def warm_up(self, logits: Tensor) -> None:
        """Run the kernels that transforms may need, with the memory of those that take much, on unused logits
        [sampled, vocab] fp32.
        """
        self._allowed.warm_up(logits)
        self._penalties.warm_up(logits)
