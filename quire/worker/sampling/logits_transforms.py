"""All that changes logits before a token is drawn, for the slots that ask for it; the others pay one look at a column.

The order is vLLM's: allowed tokens, bad words, stop tokens before min_tokens, logit_bias, logits processors, penalties.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.logits_processors import LogitsProcessor
from quire.messages import Admitted
from quire.worker.sampling.allowed_tokens import AllowedTokens
from quire.worker.sampling.bad_words import BadWords
from quire.worker.sampling.logit_bias import LogitBias
from quire.worker.sampling.penalties import Penalties
from quire.worker.sampling.slot_processors import SlotProcessors

ActiveRows = Sequence[tuple[int, int]]
"""(read, slot) of the reads whose slots have any rule."""


class LogitsTransforms:
    """By slot.

    Args:
        slots: How many there are.
        vocab_size: Of the logits.
        device: Of the logits.
        processors: The operator's.
    """

    def __init__(
        self, slots: int, vocab_size: int, device: torch.device, processors: Sequence[LogitsProcessor] = ()
    ) -> None:
        self._asks = np.zeros(slots, dtype=np.bool_)
        self._allowed = AllowedTokens(slots, vocab_size, device)
        self._bias = LogitBias(device)
        self._bad_words = BadWords(device)
        self._processors = SlotProcessors(processors)
        self._penalties = Penalties(slots, vocab_size, device)
        self._parts = (self._allowed, self._bad_words, self._bias, self._processors, self._penalties)

    def admit(self, owner: Admitted) -> None:
        """A slot's new owner."""
        self._asks[owner.slot] = sum(part.admit(owner) for part in self._parts)  # each must hear of it

    def asking(self, sampled_slots: npt.NDArray[np.int64]) -> ActiveRows:
        """Which of the reads are changed."""
        asks = self._asks[sampled_slots]
        if not asks.any():
            return ()
        reads = asks.nonzero()[0]
        return list(zip(reads.tolist(), sampled_slots[reads].tolist(), strict=True))

    def apply(self, logits: Tensor, asking: ActiveRows) -> dict[int, str]:
        """Change logits [reads, vocab] fp32 in place. Returns what went wrong, by read."""
        self._allowed.apply(logits, asking)
        self._bad_words.apply(logits, asking)
        for slot in self._bias.apply(logits, asking):
            self._asks[slot] = any(part.concerns(slot) for part in self._parts)
        errors = self._processors.apply(logits, asking)
        self._penalties.apply(logits, asking)
        return errors

    def rehearse(self, logits: Tensor) -> None:
        """Run the kernels that rules may need, with the memory of those that take much, on logits [reads, vocab] fp32
        that are nobody's."""
        self._allowed.rehearse(logits)
        self._penalties.rehearse(logits)

    def drew(self, tokens: Tensor, asking: ActiveRows) -> None:
        """What each read drew; `tokens` [reads] int64."""
        self._bad_words.drew(tokens, asking)
        self._processors.drew(tokens, asking)
        self._penalties.drew(tokens, asking)
