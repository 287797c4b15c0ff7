"""A step in the making, and what the host remembers of it while it runs.

Owns moving requests forward, all at once, and the translation to the columns of a Plan; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.kvcache.table import Reservation, TableEntries
from quire.messages import Admitted, Plan, PromptLogprobsRow
from quire.scheduler.lengths import Column, Lengths
from quire.scheduler.request import Request


class Step:
    """Rows in batch order, with the differences that come before them.

    Attributes:
        number: Counts from 1.
        requests: By row of the batch.
        tokens: In sum over the rows.
        crowded: Somebody was put back because blocks ran out: nobody new is admitted.
        predicted_ms: How long it should take, and how long its chunks beyond that; 0 when nobody knows.
        swap_out, swap_in: See Plan.
        scorers: Requests whose prompts' log probabilities it brings, in the order of `Plan.prompt_logprobs_rows`.
        rows, counts, bounds: By row of the batch, when it is planned: its request's row of lengths, how many tokens it
            moves forward by, and how many it may gain (0: it has no read), both at most.
        epochs, serials: The same rows' then.
        most: What it may gain in sum.
        masked: Rows of the batch that wait for a mask.
    """

    rows: Column
    counts: Column
    bounds: Column
    epochs: Column
    serials: Column

    def __init__(self, number: int, lengths: Lengths, *, masks: bool = False) -> None:
        """
        Args:
            lengths: Of all requests.
            masks: Whether any request's reads wait for masks.
        """
        self.number = number
        self.requests: list[Request] = []
        self.tokens = 0
        self.crowded = False
        self.predicted_ms = (0.0, 0.0)
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.scorers: list[Request] = []
        self.masked: list[int] = []
        self.most = 0
        self._lengths = lengths
        self._masks = masks
        self._guesses = False
        self._scored: list[PromptLogprobsRow] = []
        self._rows: list[Column] = []
        self._counts: list[Column] = []
        self._bounds: list[Column] = []
        self._admitted: list[Admitted] = []
        self._block_slots: list[int] = []
        self._entries = TableEntries([], [], [])
        self._copies: list[tuple[int, int]] = []
        self._given: list[int] = []
        self._given_tokens: list[int] = []

    def admit(self, request: Request) -> None:
        """Its slot is new in this step; what its table already holds is new to the slot."""
        assert request.slot is not None
        sampling = request.add.sampling
        self._admitted.append(
            Admitted(
                slot=request.slot,
                length=request.planned,
                seed=request.add.seed,
                num_sampled=request.output_len,
                sampling=sampling,
                stop_ids=request.add.stop_ids if sampling.min_tokens else [],
                bad_words=request.add.bad_words,
                history=list(request.tokens) if request.needs_history else [],
                prompt_len=request.add.prompt_len,
                rope_length=request.counts_as,
            )
        )
        self._enter(request.slot, request.table.entries())

    def reserve(self, request: Request, reservation: Reservation) -> None:
        """Blocks that a request is about to write were taken for it."""
        assert request.slot is not None
        self._enter(request.slot, reservation.entries)
        self._copies += reservation.copies

    def move(
        self, requests: Sequence[Request], rows: Column, counts: Column, drafts: Column | None = None
    ) -> list[Request]:
        """Requests move forward by so many tokens each; those that reach their end draw one, and may gain their drafts.

        Args:
            requests: In batch order, with room for their tokens and drafts.
            rows: Their rows of lengths.
            counts: At least 1 each.
            drafts: How many guesses come on top of the counts, of those that reach their end; None for none at all.

        Returns:
            Those whose input tokens the host knows: prompts and chunks, and single tokens that were settled before.
        """
        lengths, base = self._lengths, len(self.requests)
        starts, known = lengths.planned[rows], lengths.known[rows]
        given = (starts < known).nonzero()[0].tolist()
        for index in given:
            # Rows whose input the host does not know begin with a token just drawn: the device has it in the slot.
            start, count = int(starts[index]), int(counts[index])
            self._given.append(base + index)
            self._given_tokens += requests[index].tokens[start : start + count]
            self._score(requests[index], base + index, start, start + count)
        lengths.planned[rows] = ends = starts + counts
        length = known + lengths.drawing[rows]
        assert (ends <= length).all(), "a request moves beyond its tokens"
        bounds = (ends == length).astype(np.int64)
        if drafts is not None:
            assert not drafts[bounds == 0].any(), "drafts of a request that does not reach its end"
            lengths.planned[rows] += drafts
            bounds, counts, self._guesses = bounds + drafts, counts + drafts, True
        lengths.drawing[rows] += bounds
        self.requests += requests
        self.tokens += int(counts.sum())
        self._rows.append(rows)
        self._counts.append(counts)
        self._bounds.append(bounds)
        return [requests[index] for index in given]

    def plan(self) -> Plan:
        """The step as the workers get it; nothing moves any more."""
        empty = np.zeros(0, dtype=np.int64)
        self.rows = np.concatenate([empty, *self._rows])
        self.counts = np.concatenate([empty, *self._counts])
        self.bounds = np.concatenate([empty, *self._bounds])
        self.most = int(self.bounds.sum())
        self.epochs, self.serials = self._lengths.epoch[self.rows], self._lengths.serial[self.rows]
        reads, entries = self.bounds.nonzero()[0], self._entries
        if self._masks:
            self.masked = reads[self._lengths.masked[self.rows[reads]] > 0].tolist()
        return Plan(
            step=self.number,
            admitted=self._admitted,
            block_slots=self._block_slots,
            block_groups=entries.groups,
            block_indices=entries.indices,
            block_ids=entries.blocks,
            slots=[request.slot for request in self.requests],  # type: ignore[misc]  # rows have slots
            counts=self.counts.tolist(),
            token_rows=self._given,
            tokens=self._given_tokens,
            sampled_rows=reads.tolist(),
            swap_out=self.swap_out,
            copies=self._copies,
            swap_in=self.swap_in,
            prompt_logprobs_rows=self._scored,
            drafts=(self.bounds[reads] - 1).tolist() if self._guesses else [],
            masked=self.masked,
        )

    def _score(self, request: Request, row: int, start: int, end: int) -> None:
        """Of tokens `start` to `end`, look at the prompt's log probabilities, if they are wanted; each once, also when
        the request is computed again."""
        last = min(end, request.add.prompt_len - 1)
        if request.scored < last:
            assert start <= request.scored, "part of the prompt was passed over"
            skip = request.scored - start
            self._scored.append(PromptLogprobsRow(row, skip, last - request.scored, request.tokens[last]))
            self.scorers.append(request)
            request.scored = last

    def _enter(self, slot: int, entries: TableEntries) -> None:
        self._block_slots += [slot] * len(entries.blocks)
        own = self._entries
        own.groups.extend(entries.groups)
        own.indices.extend(entries.indices)
        own.blocks.extend(entries.blocks)
