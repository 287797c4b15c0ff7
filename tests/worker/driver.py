"""Drives a Worker with hand-made plans: the smallest scheduler that can say everything a Plan can."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.foundation.clock import SystemClock
from quire.foundation.config import Config
from quire.foundation.messages.workers import Admitted, Plan, Result, TokenLogprobs
from quire.runtime.worker.buffer_ring import BufferRing
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.staging_buffer import StagingBuffer
from quire.runtime.worker.worker import Worker
from quire.sampling_params import SamplingParams


def config_for(model: Path, **values: Any) -> Config:
    """A resolved config on `model`; small unless `values` say otherwise."""
    defaults: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 128,
    }
    return Config().with_values(**defaults | values)


def admitted(
    slot: int,
    *,
    seed: int,
    num_sampled: int,
    stop_ids: Any = (),
    bad_words: Any = (),
    history: Any = (),
    prompt_len: int = 0,
    **sampling: Any,
) -> Admitted:
    """A new owner whose blocks are empty."""
    params = SamplingParams(**{"max_tokens": 512} | sampling)
    return Admitted(slot, 0, seed, num_sampled, params, list(stop_ids), list(bad_words), list(history), prompt_len)


def admit(slots: SlotTable, owners: list[Admitted]) -> None:
    """New owners of slots, as at the beginning of a step."""
    slots.admit(owners)
    apply_updates(slots, Plan(step=1, admitted=owners))


def apply_updates(slots: SlotTable, plan: Plan) -> None:
    """Make the plan's changes of the slot table, on a CPU."""
    zero_copy = StagingBuffer(2**16, BufferRing(slots.device)).begin().end()
    updates = slots.stage(plan, zero_copy)
    zero_copy.finish()
    slots.apply(updates)


@dataclass
class Sequence:
    """One sequence in a slot: its prompt, how far it has moved, and what it has sampled."""

    slot: int
    prompt: list[int]
    sampling: dict[str, Any]
    num_sampled_before: int = 0
    length: int = 0
    blocks: int = 0
    sampled: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def admitted(self) -> Admitted:
        return admitted(
            self.slot, **{"seed": 1, "temperature": 0.0, "num_sampled": self.num_sampled_before} | self.sampling
        )


class Driver:
    """Owns a worker, its free blocks and the step number. A sequence has as many blocks of each of its KV groups."""

    def __init__(self, config: Config, groups: int = 1) -> None:
        self.worker = Worker(config, SystemClock())
        self.device_limits = self.worker.load()
        self.block_size = config.cache.block_size
        self.groups = groups
        self.free = list(range(1, self.device_limits.num_blocks + 1))
        self.owned: dict[int, list[int]] = {}
        self.step = 0
        self._new: list[Sequence] = []

    def admit(self, slot: int, prompt: list[int], *, num_sampled: int = 0, **sampling: Any) -> Sequence:
        """A new owner of `slot`; its blocks from an earlier owner go back first, to be used again at once."""
        self.free = self.owned.pop(slot, []) + self.free
        sequence = Sequence(slot, prompt, sampling, num_sampled)
        self._new.append(sequence)
        return sequence

    def plan(self, moves: list[tuple[Sequence, int]]) -> tuple[Plan, list[Sequence]]:
        """The plan that moves each sequence by so many tokens, and the sequences that reach their prompt's end: they
        sample.
        """
        self.step += 1
        changes: list[tuple[int, int, int, int]] = []
        given, tokens, sampled_rows, samplers = [], [], [], []
        for row, (sequence, count) in enumerate(moves):
            end = sequence.length + count
            while sequence.blocks * self.block_size < end:
                for group in range(self.groups):
                    block = self.free.pop(0)
                    self.owned.setdefault(sequence.slot, []).append(block)
                    changes.append((sequence.slot, group, sequence.blocks, block))
                sequence.blocks += 1
            if sequence.length < len(sequence.prompt):
                given.append(row)
                tokens += sequence.prompt[sequence.length : end]
            if end >= len(sequence.prompt):
                sampled_rows.append(row)
                samplers.append(sequence)
            sequence.length = end
        admitted = [s.admitted() for s in self._new]
        self._new = []
        plan = Plan(
            step=self.step,
            admitted=admitted,
            block_slots=[slot for slot, *_ in changes],
            block_groups=[group for _, group, *_ in changes],
            block_indices=[index for *_, index, _ in changes],
            block_ids=[block for *_, block in changes],
            slots=[s.slot for s, _ in moves],
            counts=[count for _, count in moves],
            token_rows=given,
            tokens=tokens,
            sampled_rows=sampled_rows,
        )
        return plan, samplers

    def move(self, moves: list[tuple[Sequence, int]]) -> Result:
        """Plan, execute, and hand the tokens out."""
        plan, samplers = self.plan(moves)
        result = self.worker.execute(plan)
        hand_out(result, samplers)
        return result

    def generate(self, sequences: list[Sequence], count: int, chunk: int = 512) -> list[list[int]]:
        """`count` tokens of each, all in one batch; prompts move `chunk` tokens at a time."""
        while any(len(s.sampled) < count for s in sequences):
            moves = []
            for s in sequences:
                left = len(s.prompt) - s.length
                if len(s.sampled) < count:
                    moves.append((s, min(left, chunk) if left > 0 else 1))
            self.move(moves)
        return [s.sampled for s in sequences]


def hand_out(result: Result, samplers: list[Sequence]) -> None:
    """Give each reader what the result says it gained."""
    assert len(result.counts) == len(samplers)
    position = 0
    for count, sequence in zip(result.counts, samplers, strict=True):
        sequence.sampled += result.tokens[position : position + count]
        if result.logprobs:
            sequence.logprobs += result.logprobs[position : position + count]
        position += count
    for place, message in result.errors:
        samplers[place].errors.append(message)
    assert position == len(result.tokens)
