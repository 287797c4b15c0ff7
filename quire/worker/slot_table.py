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

from quire.kernels.dispatch import kernel
from quire.logits_processors import LogitsProcessor
from quire.messages import Admitted, Plan
from quire.sampling import LARGEST_EFFECT, SamplingParams
from quire.worker.sampling.logits_transforms import LogitsTransforms
from quire.worker.sampling.logprobs import NO_LOGPROBS, LogprobsMode, Reports
from quire.worker.staging_buffer import Column

_INTS = 6
_FLOATS = 3


class HostSlotMirror:
    """What the host knows of each slot, as columns: its longest length, and what is reported."""

    def __init__(self, slots: int) -> None:
        self.logprobs = np.full(slots, NO_LOGPROBS, dtype=np.int64)
        self.prompt_logprobs: dict[int, int] = {}
        self.bounds = np.zeros(slots, dtype=np.int64)
        self._named: dict[int, list[int]] = {}  # tokens whose log probabilities are reported

    def admit(self, owner: Admitted) -> None:
        """A slot's new owner."""
        slot, sampling = owner.slot, owner.sampling
        self.bounds[slot] = owner.length
        self.logprobs[slot] = NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs
        self._named.pop(slot, None)
        if sampling.logprob_token_ids is not None:
            self.logprobs[slot], self._named[slot] = 0, sampling.logprob_token_ids
        self.prompt_logprobs[slot] = sampling.prompt_logprobs or 0

    def reports(self, sampled_slots: npt.NDArray[np.int64], mode: LogprobsMode) -> Reports:
        """What the reads of these slots report."""
        named = {}
        if self._named:
            named = {i: self._named[slot] for i, slot in enumerate(sampled_slots.tolist()) if slot in self._named}
        return Reports(self.logprobs[sampled_slots], named, mode)


class SlotTable:
    """The device's columns, one entry a slot, and the host's mirror of them.

    Args:
        sequences: Slots 0 to sequences - 1 are the engine's; one more is the dummy.
        blocks: Block table width: blocks of the longest sequence.
        groups: Number of KV groups.
        vocab_size: A top_k from here on cuts nothing.
        device: Where the table lives.
        processors: Logits processors.

    Attributes:
        length, rope_length, last, seed, drawn, top_k: [slots] int64.
        temperature, top_p, min_p: [slots] float32.
        tables: By KV group, [slots, blocks] int64.
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
        self._ints = torch.zeros((_INTS, slots), dtype=torch.int64, device=device)
        self._floats = torch.zeros((_FLOATS, slots), device=device)
        self._tables = torch.zeros((groups, slots, blocks), dtype=torch.int64, device=device)
        self.length, self.rope_length, self.last, self.seed, self.drawn, self.top_k = self._ints.unbind()
        self.temperature, self.top_p, self.min_p = self._floats.unbind()
        self.tables = self._tables.unbind()
        self._init_slots = kernel("init_slots", device.type)
        self.host = HostSlotMirror(slots)
        self.rules = LogitsTransforms(slots, vocab_size, device, processors)

    def init_dummy(self) -> None:
        """As a new owner of its slot: a rehearsal of the kernel that seats others."""
        slots = torch.full((1,), self.dummy, dtype=torch.int64, device=self.device)
        ints = torch.zeros(_INTS, dtype=torch.int64, device=self.device)
        floats = torch.zeros(_FLOATS, dtype=torch.float64, device=self.device)
        self._init_slots(slots, ints, floats, self._ints, self._floats, self._tables)

    def admit(self, owners: Sequence[Admitted]) -> None:
        """New owners, as far as the host decides by them; before anything else is asked about a plan's step."""
        for owner in owners:
            self.host.admit(owner)
            self.rules.admit(owner)

    def columns(self, plan: Plan) -> tuple[Column, ...]:
        """The plan's differences: new owners, then entries of block tables."""
        owners = _owners(plan.admitted, self.vocab_size) if plan.admitted else ()
        return *owners, *(self._entries(plan) if plan.block_slots else ())

    def apply(self, plan: Plan, columns: Sequence[Tensor]) -> None:
        """Make the plan's differences; `columns` are those of `columns(plan)` on the device."""
        if plan.admitted:
            slots, ints, floats = columns[:3]
            self._init_slots(slots, ints, floats, self._ints, self._floats, self._tables)
        if plan.block_slots:
            places, ids = columns[-2:]
            self._tables.view(-1).index_copy_(0, places, ids)

    def _entries(self, plan: Plan) -> tuple[Column, Column]:
        """Places in the tables as one flat array, and what stands there from now on; each place once."""
        _, slots, blocks = self._tables.shape
        where = zip(plan.block_groups, plan.block_slots, plan.block_indices, strict=True)
        places = [(group * slots + slot) * blocks + index for group, slot, index in where]
        entries = dict(zip(places, plan.block_ids, strict=True))  # the last word on each place
        number = len(entries)
        return np.fromiter(entries.keys(), np.int64, number), np.fromiter(entries.values(), np.int64, number)


def _owners(owners: Sequence[Admitted], vocab_size: int) -> tuple[Column, Column, Column]:
    """Their slots, and what stands there from now on, one owner behind another."""
    slots = np.array([owner.slot for owner in owners], dtype=np.int64)
    ints = np.array([_ints(owner, vocab_size) for owner in owners], dtype=np.int64)
    floats = np.array([_floats(owner.sampling) for owner in owners], dtype=np.float64)
    return slots, ints.reshape(-1), floats.reshape(-1)


def _ints(owner: Admitted, vocab_size: int) -> tuple[int, ...]:
    """In the table's order; nothing is drawn yet."""
    top_k = min(max(0, owner.sampling.top_k), vocab_size)
    return owner.length, owner.rope_length, 0, _signed(owner.seed), owner.num_sampled, top_k


def _floats(sampling: SamplingParams) -> tuple[float, ...]:
    """In the table's order."""
    return 0.0 if sampling.greedy else min(sampling.temperature, LARGEST_EFFECT), sampling.top_p, sampling.min_p


def _signed(seed: int) -> int:
    """The 64 bits of `seed` as torch's signed integers hold them."""
    return seed - 2**64 if seed >= 2**63 else seed
