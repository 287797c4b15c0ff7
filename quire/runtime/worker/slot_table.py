"""The slot table: what the device knows about each running sequence.

Lengths, last tokens and sampling counters advance on the device, so that a step can run before the host has seen the
result of the one before. Values that only change on admission are mirrored on the host. The last slot is the dummy: it
belongs to no sequence, and pads batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

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

_INTS = ("length", "rope_length", "last_token", "seed", "num_sampled", "top_k")
_FLOATS = ("temperature", "top_p", "min_p")
"""Columns of the table, in the order that the op `init_slots` expects."""


class SlotUpdates(NamedTuple):
    """A plan's changes of the slot table, as device tensors. A field is None where nothing changes.

    Attributes:
        owners: New owners of slots: their slots [n] int64, and their values for the table's columns, owner by owner,
            [n · columns] int64 and [n · columns] float64.
        blocks: Distinct places in the flattened block tables [n] int64, and their new block ids [n] int64.
    """

    owners: tuple[Tensor, Tensor, Tensor] | None = None
    blocks: tuple[Tensor, Tensor] | None = None


_NO_UPDATES = SlotUpdates()


class HostSlotMirror:
    """The host's copy of what it needs to know about each slot.

    Attributes:
        max_lengths: [slots] int64, the maximum number of tokens that each slot may have by now.
        prompt_logprobs: By slot, how many likeliest tokens are reported for each prompt token.
        adapters: [slots] int64, the index of each slot's adapter on the device, from 1; 0: no adapter.
        states: [slots] int64, each slot's state, from 1; 0 in models without states, and of the dummy.
        owners: [slots] int64, the number of owners so far, which shows whether a result still belongs to the owner.
    """

    def __init__(self, slots: int) -> None:
        self.max_lengths = np.zeros(slots, dtype=np.int64)
        self.prompt_logprobs: dict[int, int] = {}
        self.adapters = np.zeros(slots, dtype=np.int64)
        self.states = np.zeros(slots, dtype=np.int64)
        self.owners = np.zeros(slots, dtype=np.int64)
        self._logprobs = np.full(slots, NO_LOGPROBS, dtype=np.int64)
        self._named: dict[int, list[int]] = {}  # tokens whose log probabilities are reported

    def admit(self, owner: Admitted) -> None:
        slot, sampling = owner.slot, owner.sampling
        self.max_lengths[slot] = owner.length
        self.owners[slot] += 1
        self.adapters[slot] = owner.adapter_slot
        self.states[slot] = owner.state
        self._logprobs[slot] = NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs
        self._named.pop(slot, None)
        if sampling.logprob_token_ids is not None:
            self._logprobs[slot], self._named[slot] = 0, sampling.logprob_token_ids
        self.prompt_logprobs[slot] = sampling.prompt_logprobs or 0

    def logprobs_request(self, sampled_slots: IntArray, mode: LogprobsMode) -> LogprobsRequest | None:
        """Return which log probabilities are reported for tokens sampled for these slots; None if none are."""
        wanted, named = self._logprobs[sampled_slots], {}
        if not (wanted != NO_LOGPROBS).any():
            return None
        if self._named:
            named = {i: self._named[slot] for i, slot in enumerate(sampled_slots.tolist()) if slot in self._named}
        return LogprobsRequest(wanted, named, mode)


class SlotTable:
    """The device's columns, with one entry per slot, and the host's mirror of them.

    Args:
        sequences: Number of sequences; slots 0 to sequences - 1 hold them, and one more is the dummy.
        blocks: Width of a block table, which is the number of blocks of the longest sequence.
        drafts: Maximum draft tokens of a row.
        entries: For each KV group, how many entries of planes a block has; empty: one each. Tables name a block by its
            first entry, which is its id if it has one.

    Attributes:
        drafts: [slots, drafts] int64, the draft tokens of each slot's next step, if the device proposes them.
        recent: [slots, drafts + 1] int64, the last sampled tokens, if the device verifies drafts.
        length, rope_length, last_token, seed, num_sampled, top_k: [slots] int64.
        temperature, top_p, min_p: [slots] float32.
        tables: By KV group, [slots, blocks] int64, each block's place in the KV cache.
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
        entries: Sequence[int] = (),
    ) -> None:
        slots = sequences + 1
        self.dummy = sequences
        self.vocab_size = vocab_size
        self.device = device
        self._ints = torch.zeros((len(_INTS), slots), dtype=torch.int64, device=device)
        self._floats = torch.zeros((len(_FLOATS), slots), device=device)
        self._tables = torch.zeros((groups, slots, blocks), dtype=torch.int64, device=device)
        self.length, self.rope_length, self.last_token, self.seed, self.num_sampled, self.top_k = self._ints  # as _INTS
        self.temperature, self.top_p, self.min_p = self._floats
        self.tables = self._tables.unbind()
        self._places_of_blocks = _block_ids if set(entries) <= {1} else partial(_first_entries, tuple(entries))
        self.drafts = torch.zeros((slots, drafts), dtype=torch.int64, device=device)
        self.recent = torch.zeros((slots, drafts + 1), dtype=torch.int64, device=device)
        self._init_slots = kernel("init_slots", device.type)
        self.host = HostSlotMirror(slots)
        self.transforms = LogitsTransforms(slots, vocab_size, device, processors)

    def init_dummy(self) -> None:
        """Initialise the dummy slot with the kernel for all slots, so that this kernel is compiled."""
        slots = torch.full((1,), self.dummy, dtype=torch.int64, device=self.device)
        ints = torch.zeros(len(_INTS), dtype=torch.int64, device=self.device)
        floats = torch.zeros(len(_FLOATS), dtype=torch.float64, device=self.device)
        self._init_slots(slots, ints, floats, self._ints, self._floats, self._tables)

    def admit(self, owners: Sequence[Admitted]) -> None:
        """Update the host's mirror for new owners of slots. Call this before anything else reads the plan."""
        for owner in owners:
            self.host.admit(owner)
            self.transforms.admit(owner)

    def rewind(self, slots: Sequence[int], lengths: Sequence[int], num_sampled: Sequence[int]) -> None:
        """Set the lengths of these slots and their numbers of sampled tokens."""
        columns = np.array([slots, lengths, num_sampled], dtype=np.int64)
        where, length, sampled = upload(columns, self.device).unbind()
        self.length.index_copy_(0, where, length)
        self.num_sampled.index_copy_(0, where, sampled)
        self.host.max_lengths[columns[0]] = columns[1]

    def stage(self, plan: Plan, staging: ZeroCopyColumns) -> SlotUpdates:
        if not plan.admitted and not plan.block_slots:
            return _NO_UPDATES
        owners = _new_owners(plan.admitted, self.vocab_size, staging) if plan.admitted else None
        return SlotUpdates(owners, self._new_blocks(plan, staging) if plan.block_slots else None)

    def apply(self, updates: SlotUpdates) -> None:
        """Apply the staged changes. Block tables of new owners are emptied first."""
        owners, blocks = updates
        if owners is not None:
            self._init_slots(*owners, self._ints, self._floats, self._tables)
        if blocks is not None:
            self._tables.view(-1).index_copy_(0, *blocks)

    def _new_blocks(self, plan: Plan, staging: ZeroCopyColumns) -> tuple[Tensor, Tensor]:
        _, slots, blocks = self._tables.shape
        where = zip(plan.block_groups, plan.block_slots, plan.block_indices, strict=True)
        places = [(group * slots + slot) * blocks + index for group, slot, index in where]
        # Of two entries of one place, the later counts.
        entries = dict(zip(places, self._places_of_blocks(plan), strict=True))
        new_places = np.fromiter(entries.keys(), np.int64, len(entries))
        return staging.add(new_places), staging.add(np.fromiter(entries.values(), np.int64, len(entries)))


def _block_ids(plan: Plan) -> Sequence[int]:
    return plan.block_ids


def _first_entries(entries: tuple[int, ...], plan: Plan) -> Sequence[int]:
    return [block * entries[group] for block, group in zip(plan.block_ids, plan.block_groups, strict=True)]


def _new_owners(owners: Sequence[Admitted], vocab_size: int, staging: ZeroCopyColumns) -> tuple[Tensor, Tensor, Tensor]:
    entries = [_entries(owner, vocab_size) for owner in owners]
    slots = np.array([owner.slot for owner in owners], dtype=np.int64)
    ints = np.array([each[name] for each in entries for name in _INTS], dtype=np.int64)
    floats = np.array([each[name] for each in entries for name in _FLOATS], dtype=np.float64)
    return staging.add(slots), staging.add(ints), staging.add(floats)


def _entries(owner: Admitted, vocab_size: int) -> dict[str, float]:
    """Return a slot's value for each column. A temperature of 0 means greedy, and there is no last token yet."""
    sampling = owner.sampling
    return {
        "length": owner.length,
        "rope_length": owner.rope_length,
        "last_token": 0,
        "seed": _signed(owner.seed),
        "num_sampled": owner.num_sampled,
        "top_k": min(max(0, sampling.top_k), vocab_size),
        "temperature": 0.0 if sampling.greedy else min(sampling.temperature, LARGEST_EFFECT),
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
    }


def _signed(seed: int) -> int:
    """Return the unsigned 64-bit `seed` as a signed integer with the same bits, as torch stores it."""
    return seed - 2**64 if seed >= 2**63 else seed
