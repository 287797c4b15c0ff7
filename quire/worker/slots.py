"""The slot table: what the device knows about each running sequence.

Lengths, last tokens and draw counters move on the device, so a step can run before the host has seen the one before.
What only changes on admission is mirrored on the host, which decides from it what a step must compute. The last slot is
the dummy: it belongs to no sequence, and batches are padded with it where shapes must be fixed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.logits_processors import LogitsProcessor
from quire.messages import Admitted, Plan
from quire.worker.logprobs import NO_LOGPROBS, LogprobsMode, Reports
from quire.worker.rules import Rules


class HostMirror:
    """What the host knows of each slot, as columns: does it draw at random, is anything cut off, what is reported."""

    def __init__(self, slots: int) -> None:
        self.random = np.zeros(slots, dtype=np.bool_)
        self.cut_min_p = np.zeros(slots, dtype=np.bool_)
        self.cut_top = np.zeros(slots, dtype=np.bool_)
        self.logprobs = np.full(slots, NO_LOGPROBS, dtype=np.int64)
        self.prompt_logprobs: dict[int, int] = {}
        self.length = np.zeros(slots, dtype=np.int64)  # at most
        self._named: dict[int, list[int]] = {}  # tokens whose log probabilities are reported

    def admit(self, owner: Admitted, vocab_size: int) -> None:
        """A slot's new owner."""
        slot, sampling = owner.slot, owner.sampling
        self.length[slot] = owner.length
        self.random[slot] = not sampling.greedy
        self.cut_min_p[slot] = sampling.min_p > 0
        self.cut_top[slot] = sampling.top_p < 1 or 0 < sampling.top_k < vocab_size
        self.logprobs[slot] = NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs
        self._named.pop(slot, None)
        if sampling.logprob_token_ids is not None:
            self.logprobs[slot], self._named[slot] = 0, sampling.logprob_token_ids
        self.prompt_logprobs[slot] = sampling.prompt_logprobs or 0

    def reports(self, read_slots: npt.NDArray[np.int64], mode: LogprobsMode) -> Reports:
        """What the reads of these slots report."""
        named = {}
        if self._named:
            named = {i: self._named[slot] for i, slot in enumerate(read_slots.tolist()) if slot in self._named}
        return Reports(self.logprobs[read_slots], named, mode)


class SlotTable:
    """The device's columns, one entry a slot, and the host's mirror of them.

    Args:
        sequences: Slots 0 to sequences - 1 are the engine's; one more is the dummy.
        blocks: Block table width: blocks of the longest sequence.
        groups: Number of KV groups.
        vocab_size: A top_k from here on cuts nothing.
        device: Where the table lives.
        processors: Logits processors.
    """

    def __init__(
        self,
        sequences: int,
        blocks: int,
        groups: int,
        vocab_size: int,
        device: torch.device,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        slots = sequences + 1
        self.dummy = sequences
        self.vocab_size = vocab_size
        self.device = device
        self.length, self.counts_as, self.last, self.seed, self.drawn, self.top_k = (
            torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(6)
        )
        self.temperature, self.top_p, self.min_p = (torch.zeros(slots, device=device) for _ in range(3))
        self.tables = tuple(torch.zeros((slots, blocks), dtype=torch.int64, device=device) for _ in range(groups))
        self.host = HostMirror(slots)
        self.rules = Rules(slots, vocab_size, device, processors)

    def apply(self, plan: Plan) -> None:
        """New owners, then block table differences."""
        if plan.admitted:
            self._admit(plan.admitted)
        if plan.block_slots:
            self._enter_blocks(plan)

    def _admit(self, owners: Sequence[Admitted]) -> None:
        for owner in owners:
            self.host.admit(owner, self.vocab_size)
            self.rules.admit(owner)
        slots = self._ints([o.slot for o in owners])
        self.length[slots] = self._ints([o.length for o in owners])
        self.counts_as[slots] = self._ints([o.counts_as for o in owners])
        self.last[slots] = 0
        self.seed[slots] = self._ints([_signed(o.seed) for o in owners])
        self.drawn[slots] = self._ints([o.drawn for o in owners])
        asked = [o.sampling for o in owners]
        self.top_k[slots] = self._ints([min(max(0, s.top_k), self.vocab_size) for s in asked])
        self.temperature[slots] = self._floats([0.0 if s.greedy else s.temperature for s in asked])
        self.top_p[slots] = self._floats([s.top_p for s in asked])
        self.min_p[slots] = self._floats([s.min_p for s in asked])
        for table in self.tables:
            table[slots] = 0

    def _enter_blocks(self, plan: Plan) -> None:
        rows, columns, ids = (self._ints(x) for x in (plan.block_slots, plan.block_indices, plan.block_ids))
        if len(self.tables) == 1:
            self.tables[0][rows, columns] = ids
            return
        groups = self._ints(plan.block_groups)
        for number, table in enumerate(self.tables):
            own = groups == number
            table[rows[own], columns[own]] = ids[own]

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _floats(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)


def _signed(seed: int) -> int:
    """The 64 bits of `seed` as torch's signed integers hold them."""
    return seed - 2**64 if seed >= 2**63 else seed
