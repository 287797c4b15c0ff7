"""Every struct that crosses a process while it serves (`processes/launch.py` has those of its start), and its cost.

A request is one message in. A step is one Plan, one Result and one Deltas per API process, whatever the batch size.

Plain data for msgspec over ZMQ, a direct call or shared memory; no torch, no I/O. Columns, not objects: a plan of
256 rows is a few hundred bytes. Encoded as arrays, so the order of the fields is the wire format.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from quire.sampling import SamplingParams

EXPECTED_OUTPUT = 256
"""Output tokens that a waiting sequence is expected to bring, as long as none has ended."""
CLIENT_SHIFT = 48
"""Request ids are unique over API processes: the bits from this one on are the process's number."""

STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets into which a step's tokens are counted."""

WORK_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""The same for pieces of work, in seconds of processor time."""


class EngineId(NamedTuple):
    """Which life of which engine: what an earlier life still says is told from what the present one says.

    Attributes:
        engine: Its number.
        epoch: How often it was started again.
    """

    engine: int = 0
    epoch: int = 0


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class _FromEngine(_Message, frozen=True, kw_only=True):
    source: EngineId = EngineId()
    """The engine that says it."""


# --- API process → engine -------------------------------------------------------------------------------------------


def queued_tokens(sampling: SamplingParams, prompt_tokens: int, output_tokens: float) -> int:
    """What a waiting sequence adds to the queue: tokens of its prompt that are not computed, and those it should bring;
    one whose log probabilities are wanted counts twice."""
    per_prompt_token = 1 if sampling.prompt_logprobs is None else 2
    per_output_token = 1 if sampling.num_reported is None else 2
    return per_prompt_token * prompt_tokens + per_output_token * max(1, round(output_tokens))


class Fork(msgspec.Struct, frozen=True, array_like=True):
    """Another sequence of an Add's prompt, with parameters of its own for what differs.

    Attributes:
        id: See Add.
        seed: See Add.
        generated: On a replay: its tokens after the prompt.
    """

    id: int
    seed: int
    generated: list[int] = []


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter. What makes it that one is its contents: another under the same name is another.

    Attributes:
        name: By which requests choose it.
        path: Directory of its files.
        digest: Of all that decides what it computes, in hex.
    """

    name: str
    path: str
    digest: str


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """How long a sequence may reason, and how that is seen in its tokens.

    Attributes:
        tokens: Most tokens of reasoning; then what ends it is sampled.
        start: What opens reasoning.
        ends: What ends it, each of one token or more. The first is sampled when the budget is spent.
        again: Reasoning may begin again after it has ended, on what is left of the budget.
        opened: Whether the prompt has opened it; None: the prompt's last tokens tell.
    """

    tokens: int
    start: list[int]
    ends: list[list[int]]
    again: bool = False
    opened: bool | None = None


class Add(_Message, frozen=True):
    """The sequences of one prompt, new or replayed after an engine's death. Each of them gets exactly one End.

    Attributes:
        id: Of the first sequence. Unique; `id >> CLIENT_SHIFT` is the API process its Deltas go to.
        tokens: The prompt, followed on a replay by the tokens that the first sequence has generated.
        prompt_len: How many of `tokens` are the prompt; the rest counts against `max_tokens`.
        sampling: As the user asked; `max_tokens` is resolved to a number.
        stop_ids: Tokens that end the sequence: the model's end-of-sequence tokens and `sampling.stop_token_ids`.
        seed: Of the counter-based random numbers; the client picks one when the user gave none. In [0, 2**64).
        arrival: Seconds on the machine-wide monotonic clock.
        priority: Lower goes first, under `--scheduling-policy priority`.
        cache_salt: Cached prefixes are shared only between requests of the same salt.
        forks: The other sequences, which share the first one's prompt blocks.
        bad_words: `sampling.bad_words` as tokens: after all but the last token of one, its last token is not sampled.
        grammar: What the output must be, as the text that `quire.structured_output` makes of a constraint it has
            checked; empty for anything.
        thinking: How long each sequence may reason; None: as long as it likes.
        fork_of: In what `sequences` returns: the first sequence of the prompt, for all others. Never sent.
        deadline: When its sequences end if they have not, with what they have; on the clock of `arrival`.
        tenant: Whose it is: waiting requests of different tenants are served in turn.
        adapter: What the base model is changed by for its sequences; None: by nothing.
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
    forks: list[Fork] = []
    bad_words: list[list[int]] = []
    grammar: str = ""
    thinking: ThinkingBudget | None = None
    fork_of: int | None = None
    deadline: float | None = None
    tenant: str = ""
    adapter: Adapter | None = None

    @property
    def last_id(self) -> int:
        """The highest of its sequences' ids, which clients count upwards."""
        return self.forks[-1].id if self.forks else self.id

    def queued_tokens(self, expected_output: float) -> int:
        """What all its sequences add to a queue, in tokens: see `queued_tokens`."""
        return self._queued(len(self.tokens), expected_output) + len(self.forks) * self._queued(1, expected_output)

    def _queued(self, prompt_tokens: int, expected_output: float) -> int:
        output = min(self.sampling.max_tokens or 0, expected_output)
        return queued_tokens(self.sampling, prompt_tokens, output)

    def sequences(self) -> list[Add]:
        """One Add for each sequence, the first is this one. Forks share its lists, so nobody may change those."""
        if not self.forks:
            return [self]
        prompt = self.tokens if len(self.tokens) == self.prompt_len else self.tokens[: self.prompt_len]
        forks = [
            msgspec.structs.replace(
                self,
                id=fork.id,
                tokens=prompt + fork.generated if fork.generated else prompt,
                seed=fork.seed,
                forks=[],
                fork_of=self.id,
            )
            for fork in self.forks
        ]
        return [self, *forks]


class Abort(_Message, frozen=True):
    """Stop these sequences; unknown ids are ignored."""

    ids: list[int]


PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of admitted requests at a pause: they end, they go on, or they keep their place and wait."""


class Control(_Message, frozen=True):
    """A command, answered by exactly one Done. Actions: `drain`, `counts`, `reset_prefix_cache`, `is_paused`, `resume`,
    `pause:` with a PauseMode, `load_adapter` of `name` and `path`, `unload_adapter` of `name`, and `frame` for one of
    the live picture, newer than the one whose number was `seen`."""

    id: int
    action: str
    value: dict[str, str] = {}


class ClientHeartbeat(_Message, frozen=True):
    """API process `client` is alive; without these its requests are aborted."""

    client: int


class ClientGone(_Message, frozen=True):
    """API process `client` is dead, and its number is not used again: its requests are aborted. Sent by who saw it."""

    client: int


ToEngine = Add | Abort | Control | ClientHeartbeat | ClientGone


# --- engine → API process -------------------------------------------------------------------------------------------


class Ready(_FromEngine, frozen=True):
    """The engine takes work. Sent once, with the limits that only the device could tell."""

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
    paused: Literal["", PauseMode] = ""
    """How the engine is paused, for a client that was not there when it was."""
    adapters: list[Adapter] = []
    """Those that are loaded, for the same client."""


class TokenLogprobs(_Message, frozen=True):
    """A token's own log probability and rank (1 = likeliest), and other tokens': the likeliest, best first, or those of
    `logprob_token_ids`, in their order."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


EndReason = Literal["stop", "length", "abort", "error", "repetition", "timeout"]


class End(_Message, frozen=True):
    """The one last message of a sequence.

    Attributes:
        id: The sequence.
        reason: `stop` by a token of `Add.stop_ids`, `length`, `repetition`, `timeout`, `abort`, or `error`.
        message: For `error`: what failed, safe to show to the client.
        queued_s, prefill_s, decode_s: Seconds waiting, from first plan to first token, and from there to the end.
        preemptions: How often it was preempted.
        cached_tokens: Prompt tokens found in the prefix cache, or shared with the sequence it forked from.
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
    """Tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Those of them that were found."""
    drafts: int = 0
    """Rows with draft tokens since the engine's start, as the next two."""
    draft_tokens: int = 0
    """These tokens."""
    accepted_drafts: list[int] = []
    """By position, how many of them were accepted."""
    free_host_blocks: int = 0
    """Of those that are ready."""
    num_host_blocks: int = 0
    """Ready or not."""
    step: int = 0
    step_ms: float = 0.0
    deferred: int = 0
    """Of the waiting: how many wait for a token in flight, or for the prompt they share, and not for room."""
    unwritten_tokens: int = 0
    """Tokens that still fit into the blocks in use: internal fragmentation."""
    block_size: int = 0
    ready_host_blocks: int = 0
    queued_tokens: int = 0
    """Tokens to be computed for the waiting: prompts, and outputs as long as they are expected to be."""
    tokens_per_s: float = 0.0
    """Tokens that the engine computes, or finds computed, in a second while requests wait; estimated at first. 0: not
    known."""
    expected_output: float = EXPECTED_OUTPUT
    """Tokens that a sequence brings on average."""
    paused: Literal["", PauseMode] = ""
    """How the engine is paused; empty: it is not."""
    running_adapters: list[str] = []
    """Names of the adapters that requests use."""
    waiting_adapters: list[str] = []
    """Names of those that requests wait for, until there is a slot."""


class Deltas(_FromEngine, frozen=True):
    """What one step brought to one API process's requests.

    `counts[i]` tokens of the flat `tokens` belong to `ids[i]`; `logprobs`, when not empty, has one entry a token
    (None where it was not asked for). A sequence's End comes with or after its last tokens.

    Attributes:
        prompt_logprobs: (sequence, the next tokens' log probabilities), from the prompt's second token on; all of them
            come before the output.
        cached_tokens: (sequence, prompt tokens found in the prefix cache), with its first token.
        last_add: `Add.last_id` of the last Add that came from this process; later ones are not in `load`.
    """

    ids: list[int]
    counts: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] = []
    ends: list[End] = []
    load: Load = Load()
    prompt_logprobs: list[tuple[int, list[TokenLogprobs]]] = []
    cached_tokens: list[tuple[int, int]] = []
    last_add: int = 0


class Done(_FromEngine, frozen=True):
    """The answer to Control `id`: a value, or an error's text."""

    id: int
    value: dict[str, Any] = {}
    error: str = ""


class Heartbeat(_FromEngine, frozen=True):
    """The engine is alive.

    Attributes:
        now: Monotonic seconds.
        last_progress: When the last step finished, or when the engine was last idle, in monotonic seconds.
        limit_s: How long the present step may take, in seconds from `last_progress`, before the engine counts as stuck.
        step_tokens: Histogram of the tokens a step computes: steps per bucket of STEP_TOKEN_BOUNDS, and one more above.
        step_tokens_sum: Tokens of all steps.
        turns: Histogram of the loop's turns by the processor time they took: WORK_BOUNDS_S, and one more above.
        turns_sum_s, longest_turn_s: Processor time of all turns, and of the longest.
        last_add: See Deltas.
    """

    now: float
    last_progress: float
    load: Load = Load()
    step_tokens: list[int] = []
    step_tokens_sum: int = 0
    turns: list[int] = []
    turns_sum_s: float = 0.0
    longest_turn_s: float = 0.0
    last_add: int = 0
    limit_s: float = 30.0


class Dead(_FromEngine, frozen=True):
    """The engine is gone; sent by who saw it. None of its messages follows.

    Attributes:
        cause: Why.
        successor: The engine that takes its place; None: there is none.
        in_flight: Sequences that it was working on.
        turn: Which API process may send the successor something, see SearchTurns; None: all may.
    """

    cause: str
    successor: EngineId | None = None
    in_flight: list[int] = []
    turn: int | None = None


FromEngine = Ready | Deltas | Done | Heartbeat | Dead


# --- engine ↔ workers -----------------------------------------------------------------------------------------------


class Admitted(_Message, frozen=True):
    """A slot's new owner.

    Attributes:
        slot: Index into the slot table.
        length: Tokens whose keys and values are in its blocks already: found in the prefix cache, shared with the
            request it forks from, or swapped in.
        seed: Of its random numbers.
        num_sampled: Tokens sampled before (preemption, replay): where the random counter starts.
        sampling: As the user asked.
        stop_ids: Not sampled before the counter reaches `sampling.min_tokens`; empty when that is 0.
        bad_words: See Add.
        history: All tokens so far, if sampling or drafting depends on them; else empty.
        prompt_len: How many of them are the prompt.
        cache_salt: See Add. Nothing that other salts have said may be told by what is guessed, and how fast.
        rope_length: In models whose rotary embedding depends on the sequence's length: the least length to go by.
        adapter_slot: Where its adapter is on the device, from 1; 0: it has none.
    """

    slot: int
    length: int
    seed: int
    num_sampled: int
    sampling: SamplingParams
    stop_ids: list[int] = []
    bad_words: list[list[int]] = []
    history: list[int] = []
    prompt_len: int = 0
    cache_salt: str = ""
    rope_length: int = 0
    adapter_slot: int = 0


class PromptLogprobsRow(_Message, frozen=True):
    """A row with positions whose prompt log probabilities are wanted.

    Attributes:
        row: Index into the plan's rows; one of `token_rows`.
        skip, count: The row's positions from `skip` on, `count` of them; each one's logits score the next token.
        next_token: The token after the row's last one.
    """

    row: int
    skip: int
    count: int
    next_token: int


class Plan(_Message, frozen=True):
    """One step, as ordered columns and changes since the step before; what is not named has not changed.

    Order of effect: `admitted` reset their slots; block tables change; blocks are swapped out, copied, swapped in;
    every row moves its slot forward by `counts[row]` tokens; every sampled row samples a token.

    Counts are upper bounds: the device owns the lengths, and positions and slot mapping follow from them there. A
    sampled row with d drafts carries d draft tokens of the slot's own after the known ones, or fewer where the worker
    finds fewer. It gains 0 to 1 + d tokens, and its slot moves forward by its count, less 1 + d, plus what it gained:
    the last token of the sequence is the next row's input, and its keys are not computed yet. Later plans in flight
    rely on the upper bounds.

    Attributes:
        step: Counts from 1.
        admitted: Slots with a new owner. A free slot is not named until it is admitted again.
        block_slots, block_groups, block_indices, block_ids: Block table changes: block `id` is entry `index` of the
            table of (slot, KV group).
        slots: The slot of each row, in batch order.
        counts: How many tokens each row moves forward by.
        token_rows: Rows (ascending) whose input comes with the plan, in `tokens`. Every other row's input is the last
            token of its slot's sequence, on the device.
        tokens: Input tokens of `token_rows`, concatenated, without drafts.
        sampled_rows: Rows (ascending) that sample a token from the logits of their last position.
        drafts: For each sampled row the number of its draft tokens; empty: none at all.
        masked: Sampled rows (ascending) that wait for their TokenBitmasks before they sample.
        swap_out: (device block, host block): contents to keep.
        copies: (from, to): device blocks, copied before a shared one is written.
        swap_in: (host block, device block).
        prompt_logprobs_rows: Rows with positions whose prompt log probabilities are wanted.
    """

    step: int
    admitted: list[Admitted]
    block_slots: list[int]
    block_groups: list[int]
    block_indices: list[int]
    block_ids: list[int]
    slots: list[int]
    counts: list[int]
    token_rows: list[int]
    tokens: list[int]
    sampled_rows: list[int]
    swap_out: list[tuple[int, int]] = []
    copies: list[tuple[int, int]] = []
    swap_in: list[tuple[int, int]] = []
    prompt_logprobs_rows: list[PromptLogprobsRow] = []
    drafts: list[int] = []
    masked: list[int] = []


Bits = bytes | memoryview
"""A token bitmask."""


class TokenBitmasks(_Message, frozen=True):
    """Which tokens the masked rows of a plan may sample; sent after the plan, when the tokens before are known.

    Attributes:
        step: The plan's.
        rows: `Plan.masked`, all of them.
        bits: A bitmask per row, 1 where a token is allowed: token t is bit t % 8 of byte t // 8. Padded to a multiple
            of 4 bytes. Of a row with drafts one per position, in order.
        counts: How many bitmasks each row has, at least 1; empty: one each. A row that has no more than its first n
            samples no more than n tokens, whatever drafts it has.
    """

    step: int
    rows: list[int]
    bits: list[Bits]
    counts: list[int] = []


class MaskedDrafts(_Message, frozen=True):
    """What the worker proposed for the masked rows of a step that has begun: their bitmasks depend on it.

    Sent for a plan that allows a masked row drafts, before its bitmasks are waited for; none was proposed for a row of
    no tokens.

    Attributes:
        step: The plan's.
        tokens: The drafts of each row of `Plan.masked`.
    """

    step: int
    tokens: list[list[int]]


class Result(_Message, frozen=True):
    """What a Plan brought, in the order of its sampled rows.

    Attributes:
        step: The plan's.
        counts: Tokens each sampled row gained: 0 to 1 + its drafts.
        tokens: Those tokens, concatenated.
        logprobs: Empty, or one entry a token.
        errors: (index into the sampled rows, message): that sequence failed (NaN logits, say) and gained nothing.
        device_ms: How long the step took on the device.
        prompt_logprobs: One list for each of `Plan.prompt_logprobs_rows`, one entry a position.
        ready_host_blocks: From now on plans may swap to the host blocks 0 to this number - 1; 0: as many as before.
        drafted: How many draft tokens each sampled row really had, at most as many as planned; empty: none had any.
        undrafted: Up to this step the worker makes no drafts: plans that allow any would only reserve room for them.
    """

    step: int
    counts: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] = []
    errors: list[tuple[int, str]] = []
    device_ms: float = 0.0
    prompt_logprobs: list[list[TokenLogprobs]] = []
    ready_host_blocks: int = 0
    drafted: list[int] = []
    undrafted: int = 0


class AdapterLoaded(_Message, frozen=True):
    """An adapter was brought to the device, or was not.

    Attributes:
        adapter: Which; its digest is that of the files, if they could be read.
        slot: Where it is; 0: it was only read.
        error: Why it is not there; empty: it is.
    """

    adapter: Adapter
    slot: int
    error: str = ""


class DeviceLimits(_Message, frozen=True):
    """What only the device can tell; reported once, when the workers have started."""

    num_blocks: int
    """Usable KV blocks, ids 1 to num_blocks; 0 is the dummy block."""
    vocab_size: int
    num_host_blocks: int = 0
    """Blocks of the host pool that preempted sequences are swapped to; ids from 0. Results say when they are ready."""
    startup: dict[str, float] = {}
    """Seconds by stage."""
    step_sizes: list[tuple[int, int]] = []
    """(tokens, rows), ascending: with prompt chunks beside up to `rows` decode rows, a step is padded to the next of
    these numbers of tokens. Empty: no padding, each token costs time."""
    masked_drafts: bool = False
    """Whether masked rows may have drafts: the executor says which ones they are, see MaskedDrafts."""
