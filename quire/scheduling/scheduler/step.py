"""A step while it is scheduled, and what the host remembers of it while it runs.

Owns moving requests forward, all at once, and the translation to the columns of a Plan; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.foundation.messages.workers import Admitted, MediaRow, Plan, PooledRow, PromptLogprobsRow
from quire.scheduling.kvcache.block_table import Reservation, TableEntries
from quire.scheduling.scheduler.encoder_cache import EncoderCache
from quire.scheduling.scheduler.lengths import IntArray, Lengths
from quire.scheduling.scheduler.media_positions import media_row
from quire.scheduling.scheduler.request import Request

_EMPTY = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class ScheduledStep:
    """A step in flight: what the host needs to know when its result comes.

    Attributes:
        requests: The request of each row of the batch.
        counts: Tokens that each row computes, drafts included.
        max_new_tokens: Maximum number of tokens that each row brings: 0 if it samples none, else 1 and its drafts.
        epochs, serials: Of each row's request when the step was planned.
        masked: Rows that wait for a mask.
        prompt_logprobs_requests: Whose prompt's log probabilities it brings, by `Plan.prompt_logprobs_rows`.
        pooled_rows: Rows whose texts it pools.
        predicted_ms: How long it should take without its chunks, and its chunks beyond that; 0 if unknown.
    """

    number: int
    requests: list[Request]
    index: IntArray
    counts: IntArray
    max_new_tokens: IntArray
    total_max_new_tokens: int
    epochs: IntArray
    serials: IntArray
    masked: list[int]
    prompt_logprobs_requests: list[Request]
    predicted_ms: tuple[float, float]
    pooled_rows: list[PooledRow]

    @property
    def awaits_drafts(self) -> bool:
        """Whether the masks of some row depend on its draft tokens."""
        return bool((self.max_new_tokens[self.masked] > 1).any())


class Step:
    """A step in the making: rows in batch order, and the changes to slots and blocks that come before them. `masks`
    says whether any request is sampled under masks, `pools` whether any is pooled, `media` which images are computed.

    Attributes:
        requests: The request of each row of the batch.
        out_of_blocks: Whether a request was preempted because blocks ran out; then no new one is admitted.
        state_loads, state_saves, state_marks: Those of the Plan.
    """

    def __init__(
        self,
        number: int,
        lengths: Lengths,
        *,
        masks: bool = False,
        pools: bool = False,
        media: EncoderCache | None = None,
    ) -> None:
        self.number = number
        self.requests: list[Request] = []
        self.tokens = 0
        self.out_of_blocks = False
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.state_loads: list[tuple[int, int]] = []
        self.state_saves: list[tuple[int, int]] = []
        self.state_marks: list[tuple[int, int, int]] = []
        self._lengths = lengths
        self._masks = masks
        self._pools = pools
        self._media = media
        self._has_drafts = False
        self._prompt_logprobs_rows: list[PromptLogprobsRow] = []
        self._prompt_logprobs_requests: list[Request] = []
        self._pooled_rows: list[PooledRow] = []
        self._token_types = bytearray()
        self._media_rows: list[MediaRow] = []
        self._index: list[IntArray] = []
        self._counts: list[IntArray] = []
        self._max_new_tokens: list[IntArray] = []
        self._admitted: list[Admitted] = []
        self._block_slots: list[int] = []
        self._entries = TableEntries([], [], [])
        self._copies: list[tuple[int, int]] = []
        self._token_rows: list[int] = []
        self._tokens: list[int] = []

    def admit(self, request: Request) -> None:
        """Add a request that has a new slot in this step, with the blocks that its table already holds."""
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
                cache_salt=request.add.cache_salt,
                rope_length=request.rope_length,
                adapter_slot=request.adapter_slot,
                pooling=request.add.pooling,
                state=0 if request.states is None else request.states.current,
                source=request.add.source,
                transcript=request.add.transcript,
            )
        )
        self._add_entries(request.slot, request.table.entries())

    def reserve(self, request: Request, reservation: Reservation) -> None:
        """Add blocks that were allocated for tokens which the request is about to write."""
        assert request.slot is not None
        self._add_entries(request.slot, reservation.entries)
        self._copies += reservation.copies

    def move(
        self, requests: Sequence[Request], index: IntArray, counts: IntArray, drafts: IntArray | None = None
    ) -> list[Request]:
        """Move requests forward by so many tokens each; those that reach their last token sample the next one.

        Example: A has a prompt of 10 tokens, none computed. B decodes: 12 tokens are known, all of them planned, and a
        plan in flight samples the 13th. `move([A, B], …, counts=[8, 1])` changes

            A: planned 0 → 8. Its end is 10, so nothing is sampled. Its input goes with the plan: it is a token row.
            B: planned 12 → 13. Its end is 13 = known 12 + in_flight_tokens 1, so it samples one token: in_flight_tokens
               1 → 2. Its input is the 13th token, which only the device knows.

        With 3 drafts B computes 4 tokens (planned 12 → 16) and brings at most 4 (in_flight_tokens 1 → 5).

        Args:
            requests: In batch order, with blocks for their tokens and drafts.
            counts: Tokens of each without drafts, at least 1.
            drafts: Draft tokens of each, 0 for those that do not reach their end; None for no drafts at all.

        Returns:
            Requests whose input the host knows: prompts, chunks, and tokens of processed results.
        """
        lengths, first_row = self._lengths, len(self.requests)
        starts, known = lengths.planned[index], lengths.known[index]
        ends, length = starts + counts, known + lengths.in_flight_tokens[index]
        assert (ends <= length).all(), "a request moves beyond its tokens"
        token_rows = (starts < known).nonzero()[0].tolist()
        for place in token_rows:
            self._add_input(requests[place], first_row + place, int(starts[place]), int(ends[place]))
        max_new_tokens = (ends == length).astype(np.int64)
        if self._pools:
            max_new_tokens[lengths.pools[index] > 0] = 0
        if drafts is not None:
            assert not drafts[max_new_tokens == 0].any(), "drafts of a request that does not reach its end"
            ends, counts, max_new_tokens = ends + drafts, counts + drafts, max_new_tokens + drafts
            self._has_drafts = True
        lengths.planned[index] = ends
        lengths.in_flight_tokens[index] += max_new_tokens
        self.requests += requests
        self.tokens += int(counts.sum())
        self._index.append(index)
        self._counts.append(counts)
        self._max_new_tokens.append(max_new_tokens)
        return [requests[place] for place in token_rows]

    def finish(self, predicted_ms: tuple[float, float]) -> tuple[Plan, ScheduledStep]:
        """The step as workers get it, and as the host remembers it. Nothing can move any more."""
        index, counts, max_new_tokens = map(_joined, (self._index, self._counts, self._max_new_tokens))
        sampled, entries, lengths = max_new_tokens.nonzero()[0], self._entries, self._lengths
        masked = sampled[lengths.masked[index[sampled]] > 0].tolist() if self._masks else []
        plan = Plan(
            step=self.number,
            admitted=self._admitted,
            block_slots=self._block_slots,
            block_groups=entries.groups,
            block_indices=entries.indices,
            block_ids=entries.blocks,
            slots=[request.slot for request in self.requests],  # type: ignore[misc]  # rows have slots
            counts=counts.tolist(),
            token_rows=self._token_rows,
            tokens=self._tokens,
            sampled_rows=sampled.tolist(),
            swap_out=self.swap_out,
            copies=self._copies,
            swap_in=self.swap_in,
            prompt_logprobs_rows=self._prompt_logprobs_rows,
            drafts=(max_new_tokens[sampled] - 1).tolist() if self._has_drafts else [],
            masked=masked,
            pooled_rows=self._pooled_rows,
            token_types=bytes(self._token_types),
            state_loads=self.state_loads,
            state_saves=self.state_saves,
            media_rows=self._media_rows,
            state_marks=self.state_marks,
            media_dropped=[] if self._media is None else self._media.dropped,
            media_added=[] if self._media is None else self._media.added,
        )
        return plan, ScheduledStep(
            number=self.number,
            requests=self.requests,
            index=index,
            counts=counts,
            max_new_tokens=max_new_tokens,
            total_max_new_tokens=int(max_new_tokens.sum()),
            epochs=lengths.epoch[index],
            serials=lengths.serial[index],
            masked=masked,
            prompt_logprobs_requests=self._prompt_logprobs_requests,
            predicted_ms=predicted_ms,
            pooled_rows=self._pooled_rows,
        )

    def _add_input(self, request: Request, row: int, start: int, end: int) -> None:
        self._token_rows.append(row)
        self._tokens += request.tokens[start:end]
        if self._pools:
            self._add_pooled(request, row, start, end)
        if request.add.media:
            self._add_media(request, row, start, end)
        last = min(end, request.add.prompt_len - 1)  # the prompt's last token has no next prompt token to score
        first = request.prompt_logprobs_planned
        if first < last:
            assert start <= first, "a part of the prompt was not scored"
            self._prompt_logprobs_rows.append(PromptLogprobsRow(row, first - start, last - first, request.tokens[last]))
            self._prompt_logprobs_requests.append(request)
            request.prompt_logprobs_planned = last

    def _add_media(self, request: Request, row: int, start: int, end: int) -> None:
        if self._media is not None:
            self._media.use(request, start, end)
        found = media_row(request.add.media, row, start, end)
        if found is not None:
            self._media_rows.append(found)

    def _add_pooled(self, request: Request, row: int, start: int, end: int) -> None:
        add = request.add
        if add.token_types or self._token_types:
            self._token_types.extend(bytes(len(self._tokens) - (end - start) - len(self._token_types)))
            self._token_types += add.token_types[start:end] or bytes(end - start)
        if add.pooling is None:
            return
        left_out = 0 if add.pooling.per_token else add.prompt_skip
        skip = min(max(0, left_out - start), end - start)
        self._pooled_rows.append(
            PooledRow(
                row=row,
                start=start,
                skip=skip,
                count=end - start - skip,
                total=max(0, end - left_out),
                is_last=end == add.prompt_len,
            )
        )

    def _add_entries(self, slot: int, entries: TableEntries) -> None:
        self._block_slots += [slot] * len(entries.blocks)
        own = self._entries
        own.groups.extend(entries.groups)
        own.indices.extend(entries.indices)
        own.blocks.extend(entries.blocks)


def _joined(parts: list[IntArray]) -> IntArray:
    return parts[0] if len(parts) == 1 else np.concatenate([_EMPTY, *parts])
