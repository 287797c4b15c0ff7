"""The slot table: what the device knows about each running sequence.

Lengths, last tokens and sampling counters move on the device, so that a step can run before the host has seen the one
before. What changes on admission only is mirrored on the host, which decides by it what a step computes. The last slot
is the dummy: it belongs to no sequence, and batches are padded with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.compute.kernels.dispatch import kernel
from quire.foundation.messages.workers import Admitted, Plan
from quire.logits_processors import LogitsProcessor
from quire.runtime.worker.host_memory import upload
from quire.runtime.worker.sampling.logits_transforms import LogitsTransforms
from quire.runtime.worker.sampling.logprobs import NO_LOGPROBS, LogprobsMode, LogprobsRequest
from quire.runtime.worker.staging_buffer import ZeroCopyColumns
from quire.sampling_params import LARGEST_EFFECT

_INT_COLUMNS = 6
_FLOAT_COLUMNS = 3


@dataclass(frozen=True)
class SlotUpdates:
    """A plan's changes of the slot table, on the device; None: there are none.

    Attributes:
        owners: Slots with new owners, [n] int64, and their columns, one owner behind another, in the table's order:
            [n · columns] int64 and [n · columns] float64.
        blocks: Changes of the flattened block tables: [n] int64 places, each once, and [n] int64 block ids.
    """

    owners: tuple[Tensor, Tensor, Tensor] | None = None
    blocks: tuple[Tensor, Tensor] | None = None


_NO_UPDATES = SlotUpdates()


class HostSlotMirror:
    """What the host knows of each slot.

    Attributes:
        max_lengths: [slots] int64, the most tokens that each may have by now.
        prompt_logprobs: By slot, how many of the likeliest tokens are reported for each prompt token.
        adapters: [slots] int64, where each one's adapter is on the device, from 1; 0: it has none.
        owners: [slots] int64, how many each has had: a result may come when a slot is another sequence's.
    """

    def __init__(self, slots: int) -> None:
        self.max_lengths = np.zeros(slots, dtype=np.int64)
        self.prompt_logprobs: dict[int, int] = {}
        self.adapters = np.zeros(slots, dtype=np.int64)
        self.owners = np.zeros(slots, dtype=np.int64)
        self._logprobs = np.full(slots, NO_LOGPROBS, dtype=np.int64)
        self._named: dict[int, list[int]] = {}  # tokens whose log probabilities are reported

    def admit(self, owner: Admitted) -> None:
        """A slot's new owner."""
        slot, sampling = owner.slot, owner.sampling
        self.max_lengths[slot] = owner.length
        self.owners[slot] += 1
        self.adapters[slot] = owner.adapter_slot
        self._logprobs[slot] = NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs
        self._named.pop(slot, None)
        if sampling.logprob_token_ids is not None:
            self._logprobs[slot], self._named[slot] = 0, sampling.logprob_token_ids
        self.prompt_logprobs[slot] = sampling.prompt_logprobs or 0

    def logprobs_request(self, sampled_slots: IntArray, mode: LogprobsMode) -> LogprobsRequest | None:
        """Which log probabilities are reported of tokens that are sampled for these slots; None: none are."""
        wanted, named = self._logprobs[sampled_slots], {}
        if not (wanted != NO_LOGPROBS).any():
            return None
        if self._named:
            named = {i: self._named[slot] for i, slot in enumerate(sampled_slots.tolist()) if slot in self._named}
        return LogprobsRequest(wanted, named, mode)


class SlotTable:
    """The device's columns, one entry a slot, and the host's mirror of them.

    Args:
        sequences: Slots 0 to sequences - 1 are the engine's; one more is the dummy.
        blocks: Width of a block table: blocks of the longest sequence.
        groups: Number of KV groups.
        vocab_size: A top_k from here on excludes nothing.
        device: Where the table lives.
        processors: Logits processors.
        drafts: Draft tokens of a row, at most.

    Attributes:
        drafts: [slots, drafts] int64, those that a device has drawn for each slot's next step; see `draft_steps.py`.
        recent: [slots, drafts + 1] int64, what a device has sampled last, as long as it verifies drafts in each step.
        length, rope_length, last_token, seed, num_sampled, top_k: [slots] int64.
        temperature, top_p, min_p: [slots] float32.
        tables: By KV group, [slots, blocks] int64 block ids.
        host: What the host knows of the slots.
        transforms: What changes the slots' logits before a token is sampled.
    """

    def __init__(
        self,
        sequences: int,
        blocks: int,
        groups: int,
        vocab_size: int,
        device: torch.device,
        processors: Sequence[LogitsProcessor] = (),
        drafts: int = 0,
    ) -> None:
        slots = sequences + 1
        self.dummy = sequences
        self.vocab_size = vocab_size
        self.device = device
        self._ints = torch.zeros((_INT_COLUMNS, slots), dtype=torch.int64, device=device)
        self._floats = torch.zeros((_FLOAT_COLUMNS, slots), device=device)
        self._tables = torch.zeros((groups, slots, blocks), dtype=torch.int64, device=device)
        self.length, self.rope_length, self.last_token, self.seed, self.num_sampled, self.top_k = self._ints.unbind()
        self.temperature, self.top_p, self.min_p = self._floats.unbind()
        self.tables = self._tables.unbind()
        self.drafts = torch.zeros((slots, drafts), dtype=torch.int64, device=device)
        self.recent = torch.zeros((slots, drafts + 1), dtype=torch.int64, device=device)
        self._init_slots = kernel("init_slots", device.type)
        self.host = HostSlotMirror(slots)
        self.transforms = LogitsTransforms(slots, vocab_size, device, processors)

    def init_dummy(self) -> None:
        """Initialise the dummy's slot, by the kernel that initialises the others: compile warm-up launches it so."""
        slots = torch.full((1,), self.dummy, dtype=torch.int64, device=self.device)
        ints = torch.zeros(_INT_COLUMNS, dtype=torch.int64, device=self.device)
        floats = torch.zeros(_FLOAT_COLUMNS, dtype=torch.float64, device=self.device)
        self._init_slots(slots, ints, floats, self._ints, self._floats, self._tables)

    def admit(self, owners: Sequence[Admitted]) -> None:
        """New owners of slots, for the host's decisions: before anything else of a plan is looked at."""
        for owner in owners:
            self.host.admit(owner)
            self.transforms.admit(owner)

    def rewind(self, slots: Sequence[int], lengths: Sequence[int], num_sampled: Sequence[int]) -> None:
        """Set slots to these lengths, and to these numbers of sampled tokens."""
        columns = np.array([slots, lengths, num_sampled], dtype=np.int64)
        where, length, sampled = upload(columns, self.device).unbind()
        self.length.index_copy_(0, where, length)
        self.num_sampled.index_copy_(0, where, sampled)
        self.host.max_lengths[columns[0]] = columns[1]

    def stage(self, plan: Plan, staging: ZeroCopyColumns) -> SlotUpdates:
        """The plan's changes of the device's columns."""
        if not plan.admitted and not plan.block_slots:
            return _NO_UPDATES
        owners = _new_owners(plan.admitted, self.vocab_size, staging) if plan.admitted else None
        return SlotUpdates(owners, self._new_blocks(plan, staging) if plan.block_slots else None)

    def apply(self, updates: SlotUpdates) -> None:
        """Make the changes that were staged; a new owner's block tables are empty before."""
        if updates.owners is not None:
            self._init_slots(*updates.owners, self._ints, self._floats, self._tables)
        if updates.blocks is not None:
            self._tables.view(-1).index_copy_(0, *updates.blocks)

    def _new_blocks(self, plan: Plan, staging: ZeroCopyColumns) -> tuple[Tensor, Tensor]:
        _, slots, blocks = self._tables.shape
        where = zip(plan.block_groups, plan.block_slots, plan.block_indices, strict=True)
        places = [(group * slots + slot) * blocks + index for group, slot, index in where]
        entries = dict(zip(places, plan.block_ids, strict=True))  # of two entries of one place, the later counts
        number = len(entries)
        return (
            staging.add(np.fromiter(entries.keys(), np.int64, number)),
            staging.add(np.fromiter(entries.values(), np.int64, number)),
        )


def _new_owners(owners: Sequence[Admitted], vocab_size: int, staging: ZeroCopyColumns) -> tuple[Tensor, Tensor, Tensor]:
    ints = np.array([_ints(owner, vocab_size) for owner in owners], dtype=np.int64)
    floats = np.array([_floats(owner) for owner in owners], dtype=np.float64)
    return (
        staging.add(np.array([owner.slot for owner in owners], dtype=np.int64)),
        staging.add(ints.reshape(-1)),
        staging.add(floats.reshape(-1)),
    )


def _ints(owner: Admitted, vocab_size: int) -> tuple[int, ...]:
    """In the table's order; there is no last token yet."""
    top_k = min(max(0, owner.sampling.top_k), vocab_size)
    return owner.length, owner.rope_length, 0, _signed(owner.seed), owner.num_sampled, top_k


def _floats(owner: Admitted) -> tuple[float, ...]:
    """In the table's order; a temperature of 0 is greedy."""
    sampling = owner.sampling
    return 0.0 if sampling.greedy else min(sampling.temperature, LARGEST_EFFECT), sampling.top_p, sampling.min_p


def _signed(seed: int) -> int:
    """The 64 bits of `seed` as torch's signed integers hold them."""
    return seed - 2**64 if seed >= 2**63 else seed
