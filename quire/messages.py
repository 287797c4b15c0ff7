"""Every struct that crosses a process while it serves (`processes/child.py` has those of its start), and what it costs.

One message in for a request; one Plan, one Result and one Deltas for each API process a step, whatever the batch size.

Plain data for msgspec over ZMQ, a direct call or shared memory; no torch, no I/O. Columns, not objects: a plan of
256 rows is a few hundred bytes. Encoded as arrays, so the order of the fields is the wire format.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from quire.sampling import SamplingParams

CLIENT_SHIFT = 48
"""Request ids are unique over API processes: the process's number stands in the bits above this one."""

STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets into which a step's tokens are counted."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# --- API process → engine -------------------------------------------------------------------------------------------


class Add(_Message, frozen=True):
    """A new sequence, or one that is replayed after an engine's death.

    Attributes:
        id: Unique; `id >> CLIENT_SHIFT` is the API process its Deltas go to.
        tokens: The prompt, followed on a replay by the tokens already generated.
        prompt_len: How many of `tokens` are the prompt; the rest counts against `max_tokens`.
        sampling: As the user asked; `max_tokens` is resolved to a number.
        stop_ids: Tokens that end the sequence: the model's end-of-sequence tokens and `sampling.stop_token_ids`.
        seed: Of the counter-based random numbers, drawn by the client when the user gave none; in [0, 2**64).
        arrival: Seconds on the machine-wide monotonic clock.
        priority: Lower goes first, under `--scheduling-policy priority`.
        cache_salt: Cached prefixes are shared only between requests of the same salt.
        fork_of: The sequence that has the same prompt and was added before: its blocks are shared.
        bad_words: `sampling.bad_words` as tokens: where an output ends with all but the last, the last is not drawn.
    """

    id: int
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    stop_ids: list[int]
    seed: int
    arrival: float
    priority: int = 0
    cache_salt: str = ""
    fork_of: int | None = None
    bad_words: list[list[int]] = []


class Abort(_Message, frozen=True):
    """These sequences are wanted no more; ids that are gone are passed over."""

    ids: list[int]


class Control(_Message, frozen=True):
    """An order that is answered by exactly one Done. Actions: `drain`, `counts`, `reset_prefix_cache`."""

    id: int
    action: str


class ClientHeartbeat(_Message, frozen=True):
    """API process `client` is alive; without these its requests are aborted."""

    client: int


ToEngine = Add | Abort | Control | ClientHeartbeat


# --- engine → API process -------------------------------------------------------------------------------------------


class Ready(_Message, frozen=True):
    """The engine takes work. Sizing: what only the device could tell, once."""

    model: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    capacity: int
    """Most tokens (prompt and output) that one sequence can ever hold in the KV cache."""
    kv_tokens: int = 0
    """Tokens that the KV cache holds in sequences of full length."""
    startup: dict[str, float] = {}
    """Seconds by stage of the engine's start."""


class TokenLogprobs(_Message, frozen=True):
    """A token's own log probability and rank (1 = likeliest), and other tokens': the likeliest, best first, or those of
    `logprob_token_ids`, in their order."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


EndReason = Literal["stop", "length", "abort", "error", "repetition"]


class End(_Message, frozen=True):
    """The one last message of a sequence.

    Attributes:
        id: The sequence.
        reason: `stop` by a token of `Add.stop_ids`, `length`, `repetition`, `abort`, or `error`.
        message: For `error`: what failed, safe to show to the client.
        queued_s, prefill_s, decode_s: Seconds waiting, from first plan to first token, and from there to the end.
        preemptions: How often it was put back.
        cached_tokens: Prompt tokens that were not computed for it, since their blocks were there.
    """

    id: int
    reason: EndReason
    message: str = ""
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preemptions: int = 0
    cached_tokens: int = 0


class Load(_Message, frozen=True):
    """How busy the engine is: API processes answer metrics (and later 429) from it without asking."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    num_blocks: int = 0
    preemptions: int = 0
    """Since the engine's start, as the next two."""
    prefix_queries: int = 0
    """Tokens that were looked up in the prefix cache."""
    prefix_hits: int = 0
    """Tokens of these that were found."""
    free_host_blocks: int = 0
    num_host_blocks: int = 0
    step: int = 0
    step_ms: float = 0.0
    deferred: int = 0
    """Of those that wait: how many do not wait for room, but for a token in flight or the prompt that they share."""
    unwritten_tokens: int = 0
    """Tokens that would still fit into the blocks in use: what paging wastes."""
    block_size: int = 0


class Deltas(_Message, frozen=True):
    """What one step brought to one API process's requests.

    `counts[i]` tokens of the flat `tokens` belong to `ids[i]`; `logprobs`, when not empty, has one entry a token
    (None where it was not asked for). A sequence's End comes with or after its last tokens.

    Attributes:
        prompt_logprobs: Of the next tokens of a sequence's prompt, from its second one on; all come before its output.
        cached_tokens: (sequence, tokens of its prompt that were found computed), with its first token.
    """

    ids: list[int]
    counts: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] = []
    ends: list[End] = []
    load: Load = Load()
    prompt_logprobs: list[tuple[int, list[TokenLogprobs]]] = []
    cached_tokens: list[tuple[int, int]] = []


class Done(_Message, frozen=True):
    """The answer to Control `id`: a value, or an error's text."""

    id: int
    value: dict[str, Any] = {}
    error: str = ""


class Heartbeat(_Message, frozen=True):
    """The engine is alive.

    Attributes:
        last_progress: Tells whether it moves: monotonic seconds of the last finished step, or of the last moment
            without work.
        step_tokens: How many steps moved at most so many tokens forward, by bucket of STEP_TOKEN_BOUNDS, and those
            above.
        step_tokens_sum: Tokens of all steps.
    """

    now: float
    last_progress: float
    load: Load = Load()
    step_tokens: list[int] = []
    step_tokens_sum: int = 0


class Dead(_Message, frozen=True):
    """The engine stops now, and why. No request of it gets another message."""

    cause: str


FromEngine = Ready | Deltas | Done | Heartbeat | Dead


# --- engine ↔ workers -----------------------------------------------------------------------------------------------


class Admitted(_Message, frozen=True):
    """A slot's new owner.

    Attributes:
        slot: Index into the slot table.
        length: Tokens whose keys and values stand in its blocks already: found in the prefix cache, shared with the
            request it forks from, or swapped in.
        seed: Of its random numbers.
        drawn: How many tokens it has drawn before (after a preemption or replay): the random counter's start.
        sampling: As the user asked.
        stop_ids: Cannot be drawn before the counter reaches `sampling.min_tokens`; empty when that is 0.
        bad_words: See Add.
        history: All tokens so far, if what is drawn depends on them; else empty.
        prompt_len: How many of them are the prompt.
        counts_as: The length that its sequence counts as, at least, in models whose keys depend on it.
    """

    slot: int
    length: int
    seed: int
    drawn: int
    sampling: SamplingParams
    stop_ids: list[int] = []
    bad_words: list[list[int]] = []
    history: list[int] = []
    prompt_len: int = 0
    counts_as: int = 0


class ScoredRow(_Message, frozen=True):
    """A row of which the prompt's log probabilities are wanted.

    Attributes:
        row: Its place in the plan; its tokens are given.
        skip, count: Passed over the first `skip`, of `count` of its tokens the logits are looked at, each for the token
            behind it.
        next: The token behind the row's last one.
    """

    row: int
    skip: int
    count: int
    next: int


class Plan(_Message, frozen=True):
    """One step, as differences and ordered columns; what it does not say has not changed.

    Order of effect: `admitted` reset their slots, the block differences enter the tables, blocks are swapped out,
    copied, swapped in, then every row moves its slot forward by `counts[row]` tokens, then every read draws a token.

    Counts are upper bounds, and the device owns the lengths: positions and KV slots come from a slot's length there. A
    read with d drafts has d guesses of the slot's own in its row, behind the known tokens. It gains 0 to 1 + d tokens,
    and its slot moves forward by its count, less 1 + d, plus what it gained. So the slot stands before the last token
    of its sequence, whose keys are yet to be computed: it is the next row's input. Later plans in flight count on the
    bounds.

    Attributes:
        step: Counts from 1.
        admitted: Slots with a new owner. A released slot is simply not named any more until it is admitted again.
        block_slots, block_groups, block_indices, block_ids: Table differences: block `id` stands at `index` in the
            table row of (slot, KV group).
        slots: The slot of each row, in batch order.
        counts: How many tokens each row moves forward by.
        given: Rows (ascending) whose input tokens the host knows; their tokens stand in `tokens`, concatenated, without
            drafts. Every other row's input is the last token of its slot's sequence, on the device.
        tokens: See `given`.
        reads: Rows (ascending) that draw a token from the logits of their last position.
        drafts: By read, how many of its row's tokens are guesses; empty: none at all.
        masked: Rows (ascending) with a read that waits for its row of Masks before it draws.
        swap_out: (device block, host block): contents to keep.
        copies: (from, to): device blocks, before a shared one is written.
        swap_in: (host block, device block).
        scored: Rows whose prompt's log probabilities are wanted.
    """

    step: int
    admitted: list[Admitted]
    block_slots: list[int]
    block_groups: list[int]
    block_indices: list[int]
    block_ids: list[int]
    slots: list[int]
    counts: list[int]
    given: list[int]
    tokens: list[int]
    reads: list[int]
    swap_out: list[tuple[int, int]] = []
    copies: list[tuple[int, int]] = []
    swap_in: list[tuple[int, int]] = []
    scored: list[ScoredRow] = []
    drafts: list[int] = []
    masked: list[int] = []


class Masks(_Message, frozen=True):
    """Which tokens the masked reads of a plan may draw; sent when the tokens before them are known, after the plan.

    Attributes:
        step: The plan's.
        rows: `Plan.masked`, all of them.
        bits: For each row a bit a token, 1 where it is allowed: token t's is bit t % 8 of byte t // 8. Filled up with
            any bits to a multiple of 4 bytes.
    """

    step: int
    rows: list[int]
    bits: list[bytes]


class Result(_Message, frozen=True):
    """What a Plan brought, in the order of its reads.

    Attributes:
        step: The plan's.
        counts: Tokens each read gained, 0 to 1 and its drafts.
        tokens: Those tokens, flat.
        logprobs: Empty, or one entry a token.
        errors: (read, message): that sequence failed (a row of NaN, say) and gained nothing.
        device_ms: How long the step took on the device.
        prompt_logprobs: One list for each of `Plan.scored`, with an entry for each of its tokens.
    """

    step: int
    counts: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] = []
    errors: list[tuple[int, str]] = []
    device_ms: float = 0.0
    prompt_logprobs: list[list[TokenLogprobs]] = []


class Sizing(_Message, frozen=True):
    """What only the device can tell, said once when the workers are up."""

    num_blocks: int
    """Usable KV blocks, the dummy block not counted. Block ids run from 1 to num_blocks; 0 is the dummy's."""
    vocab_size: int
    num_host_blocks: int = 0
    """Blocks of the host pool that preempted sequences are swapped to; ids from 0."""
    startup: dict[str, float] = {}
    """Seconds by stage."""
    step_sizes: list[tuple[int, int]] = []
    """Numbers of tokens from which on a step with prompts beside rows of one token takes longer, ascending, and rows up
    to which it does. None: each token counts."""
