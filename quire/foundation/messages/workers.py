"""Between an engine and its workers: steps and what they bring, orders, and what only the device can tell."""

from __future__ import annotations

from quire.foundation.messages.to_engine import Adapter, Medium, Message, TranscriptRules
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams


class Admitted(Message, frozen=True):
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
        rope_length: In models whose rotary embedding depends on the sequence's length: the least length to go by. In
            models with M-RoPE: what is added to positions behind the prompt's images, at most 0.
        adapter_slot: Where its adapter is on the device, from 1; 0: it has none.
        pooling: See Add; None: it samples.
        state: Its state, in models that keep one a sequence; else 0.
        source, transcript: See Add.
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
    pooling: PoolingParams | None = None
    state: int = 0
    source: Medium | None = None
    transcript: TranscriptRules | None = None


class PooledRow(Message, frozen=True):
    """A row of a pooled sequence: the whole text, or a chunk of it.

    Attributes:
        row: Index into the plan's rows; one of `token_rows`.
        start: Position of the row's first token in the text. At 0, or behind cached tokens, pooling begins anew.
        skip, count: The row's tokens that are pooled: from `skip` on, `count` of them. 0 where `Add.prompt_skip`
            leaves all of them out.
        total: Tokens of the text that are pooled up to and with this row.
        is_last: Whether the text ends with this row.
    """

    row: int
    start: int
    skip: int
    count: int
    total: int
    is_last: bool


class PromptLogprobsRow(Message, frozen=True):
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


class MediaPiece(Message, frozen=True):
    """Tokens of a row that take vectors of an image in place of their embeddings.

    Attributes:
        skip, count: The row's tokens from `skip` on, `count` of them.
        first: Which of the image's vectors is the first of these.
        digest: The image's.
        two_sided: Whether these tokens see one another, those behind them as well.
    """

    skip: int
    count: int
    first: int
    digest: bytes
    two_sided: bool = False


class MediaRow(Message, frozen=True):
    """A row with tokens that stand for images, or, in models whose positions tell rows and columns, before such ones.

    Attributes:
        row: Index into the plan's rows; one of `token_rows`.
        pieces: The tokens that stand for images, in order.
        axes: Time, row and column of each of the row's tokens, [3, count] int64 in C order; empty: positions are as
            in texts.
    """

    row: int
    pieces: list[MediaPiece]
    axes: bytes = b""


class Plan(Message, frozen=True, kw_only=True):
    """One step, as ordered columns and changes since the step before. An empty column changes nothing.

    Order of effect: `admitted` reset their slots; block tables change; blocks are swapped out, copied, swapped in;
    states are loaded; every row moves its slot forward by `counts[row]` tokens; states are saved; every sampled row
    samples a token.

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
        swap_in: (host block, device block), of sequences that go on.
        prompt_logprobs_rows: Rows with positions whose prompt log probabilities are wanted.
        pooled_rows: Rows of pooled sequences. None of them is sampled.
        token_types: One byte for each of `tokens`, its type; empty: all are 0.
        state_loads: (from, to): states, copied one after the other before the rows move; from 0: the state of no
            tokens, which is zeros.
        state_saves: (from, to): states, copied behind the rows' tokens; no target is a source, or named twice.
        state_marks: (slot, length, to): the state behind the first `length` tokens of the slot's sequence is copied if
            a row passes them, or ends there. Only for rows that may have drafts now, or had some in a step that is not
            known yet: of these only the device knows where they end.
        media_rows: Rows with tokens that stand for images, and rows before such ones.
        media_dropped: Digests of images whose vectors are not needed any more.
        media_added: Images whose vectors are computed for this step, and kept until a plan drops them.
    """

    step: int
    admitted: list[Admitted] = []
    block_slots: list[int] = []
    block_groups: list[int] = []
    block_indices: list[int] = []
    block_ids: list[int] = []
    slots: list[int] = []
    counts: list[int] = []
    token_rows: list[int] = []
    tokens: list[int] = []
    sampled_rows: list[int] = []
    swap_out: list[tuple[int, int]] = []
    copies: list[tuple[int, int]] = []
    swap_in: list[tuple[int, int]] = []
    prompt_logprobs_rows: list[PromptLogprobsRow] = []
    drafts: list[int] = []
    masked: list[int] = []
    pooled_rows: list[PooledRow] = []
    token_types: bytes = b""
    state_loads: list[tuple[int, int]] = []
    state_saves: list[tuple[int, int]] = []
    media_rows: list[MediaRow] = []
    state_marks: list[tuple[int, int, int]] = []
    media_dropped: list[bytes] = []
    media_added: list[Medium] = []

    @classmethod
    def empty(cls, step: int = 0) -> Plan:
        """A step that changes nothing and has no rows."""
        return cls(step=step)


Bits = bytes | memoryview
"""A token bitmask."""


class TokenBitmasks(Message, frozen=True):
    """Which tokens the masked rows of a plan may sample; sent after the plan, when the tokens before are known.

    Attributes:
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


class MaskedDrafts(Message, frozen=True):
    """What the worker proposed for the rows in `Plan.masked` of a step that has begun: their bitmasks depend on it.

    Sent for a plan that allows a masked row drafts, before its bitmasks are waited for; none was proposed for a row of
    no tokens.
    """

    step: int
    tokens: list[list[int]]


class TokenLogprobs(Message, frozen=True):
    """A token's own log probability and rank (1 = likeliest), and other tokens': the likeliest, best first, or those of
    `logprob_token_ids`, in their order."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Vector(Message, frozen=True):
    """What a pooled row brought.

    Attributes:
        data: float32, little-endian, in C order; empty: nothing yet, since the text goes on.
        shape: [dim], or [tokens, dim] for tasks with a vector for each token: the row's own tokens.
        error: Why there is no vector; empty unless the row failed.
    """

    data: bytes = b""
    shape: list[int] = []
    error: str = ""


class Result(Message, frozen=True):
    """What a Plan brought, in the order of its sampled rows.

    Attributes:
        counts: Tokens each sampled row gained: 0 to 1 + its drafts.
        tokens: Those tokens, concatenated.
        logprobs: Empty, or one entry a token.
        errors: (index into the sampled rows, message): that sequence failed (NaN logits, say). Its row may still have
            gained drafts that were accepted before.
        refused: Those indices of `errors` where what the request itself asks for is to blame.
        prompt_logprobs: One list for each of `Plan.prompt_logprobs_rows`, one entry a position.
        ready_host_blocks: From now on plans may swap to the host blocks 0 to this number - 1; 0: as many as before.
        drafted: How many draft tokens each sampled row really had, at most as many as planned; empty: none had any.
        undrafted: Up to this step the worker makes no drafts: plans that allow any would only reserve room for them.
        vectors: One for each of `Plan.pooled_rows`.
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
    refused: list[int] = []
    vectors: list[Vector] = []


class LoadAdapter(Message, frozen=True):
    """Orders an adapter in a slot, from 1, that no plan in flight uses; answered by AdapterLoaded.

    Slot 0 means: only read the files, to see whether they serve and what their digest is. If the adapter has a digest,
    files with another one are refused.
    """

    adapter: Adapter
    slot: int


class AdapterLoaded(Message, frozen=True):
    """An adapter was brought to the device, or was not. The digest of `adapter` is that of its files, if they could be
    read. `slot` is 0 if it was only read, and `error` is empty unless it failed."""

    adapter: Adapter
    slot: int
    error: str = ""


class Profile(Message, frozen=True):
    """Orders a worker to count and time kernels from now on, or to end that; given while no step is in flight, and
    answered by Profiled."""

    begins: bool


class Profiled(Message, frozen=True):
    """What kernels took since a profile began, by rank, as runtime/worker/kernel_profile.py counts it; empty as it
    begins."""

    kernels: list[dict[str, tuple[float, int]]]


class DiskBlock(Message, frozen=True):
    """A block in a slot of the disk, with its key, and its place on the host."""

    slot: int
    group: int
    hash: bytes
    host: int


class LoadBlocks(Message, frozen=True):
    """Orders host blocks to the device while steps go on, which neither read nor write the device's blocks; answered by
    BlocksLoaded.

    Attributes:
        number: Of the order, from 1.
        after: Nothing is read or written before this step's own moves are made; 0: at once.
        loads: (host block, device block).
    """

    number: int
    after: int
    loads: list[tuple[int, int]]


class BlocksLoaded(Message, frozen=True):
    """An order to load blocks is done, except for the device blocks `failed`, which may hold anything. `ms` is what it
    took from when its turn came."""

    number: int
    failed: list[int] = []
    ms: float = 0.0


class SaveBlocks(Message, frozen=True):
    """Orders device blocks, which plans behind step `after` may overwrite, to host blocks that nobody uses meanwhile;
    answered by BlocksSaved. A copy is good if no plan that was made before the answer came has overwritten its block.

    Attributes:
        number: Of the order, from 1.
        after: Nothing is read or written before this step is launched; 0: at once.
        saves: (device block, host block).
    """

    number: int
    after: int
    saves: list[tuple[int, int]]


class BlocksSaved(Message, frozen=True):
    """An order to save blocks is done, except for the host blocks `failed`, which may hold anything. `ms` is what it
    took from when its turn came."""

    number: int
    failed: list[int] = []
    ms: float = 0.0


class ReadBlocks(Message, frozen=True):
    """Orders blocks from the disk to host blocks, which nobody uses meanwhile, once the moves of step `after` are made;
    answered by BlocksRead."""

    number: int
    after: int
    blocks: list[DiskBlock]


class BlocksRead(Message, frozen=True):
    """An order to read blocks is done, except for the slots `failed`, which hold something else, or cannot be read.
    `ms` is what it took."""

    number: int
    failed: list[int] = []
    ms: float = 0.0


class StoreBlocks(Message, frozen=True):
    """Orders host blocks, which keep their contents meanwhile, to the disk; answered by BlocksStored. The slots
    `dropped` are erased before."""

    number: int
    blocks: list[DiskBlock]
    dropped: list[int] = []


class BlocksStored(Message, frozen=True):
    """An order to store blocks is done, except for the slots `failed`, which could not be written. `ms` is what it
    took."""

    number: int
    failed: list[int] = []
    ms: float = 0.0


Order = LoadAdapter | LoadBlocks | Profile | ReadBlocks | SaveBlocks | StoreBlocks
"""Work beside the steps."""
OrderDone = AdapterLoaded | BlocksLoaded | BlocksRead | BlocksSaved | BlocksStored | Profiled
"""The one answer to an order."""


class DiskContents(Message, frozen=True):
    """What a disk has room for, and what is there: (slot, group, hash), the oldest first. `load_ms` is what a block
    takes to the host."""

    num_blocks: int
    entries: list[tuple[int, int, bytes]] = []
    load_ms: float = 0.0


class DeviceLimits(Message, frozen=True):
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
    num_states: int = 0
    """States of sequences and of their checkpoints, ids 1 to num_states; 0 in models without states."""
    load_block_ms: float = 0.0
    """Milliseconds that loading a host block takes, as measured; 0: not measured."""
    disk: DiskContents | None = None
    """None without --kv-disk-path."""
    ready_host_blocks: int = 0
    """Host blocks that are ready at the start."""
