"""From an engine to API processes: what steps have brought, answers to commands, and how the engine is."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from quire.foundation.messages.to_engine import Adapter, Message, PauseMode
from quire.foundation.messages.workers import TokenLogprobs
from quire.pooling_params import PoolingTask

EXPECTED_OUTPUT = 256
"""Output tokens that a waiting sequence is expected to bring, until one has ended."""

STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets into which a step's tokens are counted."""

WORK_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the buckets into which pieces of work are counted, in seconds of processor time."""


class EngineId(NamedTuple):
    """An engine (its number) and one of its lives (how often it was started again), which tells late messages apart."""

    engine: int = 0
    epoch: int = 0


class _FromEngine(Message, frozen=True, kw_only=True):
    source: EngineId = EngineId()
    """The sender."""


class PoolingInfo(Message, frozen=True):
    """What a model makes of whole texts, and what clients have to know for that. API processes find it as
    `Ready.pooling`, the server's session as `session.ready.pooling`.

    Attributes:
        tasks: Tasks that are served, the default first; empty: none.
        generates: Whether the model also generates text here (`--runner generate`).
        dim: Length of an embedding; 0 if the model embeds nothing.
        dimensions: Shorter lengths that `PoolingParams.dimensions` may have; empty: any up to `dim` if `matryoshka`.
        matryoshka: Whether embeddings may be shortened at all.
        labels: Names of the labels of `classify` and `token_classify`, in the order of their values.
        reads_pairs: Whether one text of the model may be a pair of texts (cross-encoders).
        prompts: Texts that go before a text, by name (sentence-transformers' `prompts`).
        default_prompt: The name of the prompt that every text gets which asks for none; empty: none.
        include_prompt: Whether a prompt's tokens are pooled like the text's; else clients send `Add.prompt_skip`.
        similarity: How embeddings are compared: cosine, dot, euclidean or manhattan.
        max_embed_len: Longest text in tokens, if it is shorter than `Ready.capacity`; 0: it is not.
        lowercases: Whether texts are lower-cased before they are tokenized (`do_lower_case`).
    """

    tasks: list[PoolingTask] = []
    generates: bool = True
    dim: int = 0
    dimensions: list[int] = []
    matryoshka: bool = False
    labels: list[str] = []
    reads_pairs: bool = False
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    include_prompt: bool = True
    similarity: str = "cosine"
    max_embed_len: int = 0
    lowercases: bool = False

    @property
    def runner(self) -> Literal["generate", "pooling"]:
        """What the model is run for, as vLLM's `--runner` says it."""
        return "generate" if self.generates else "pooling"


NO_POOLING = PoolingInfo()
"""A model that generates text and makes nothing of whole texts."""


class Ready(_FromEngine, frozen=True):
    """The engine takes work. Sent once, with the limits that only the device can tell."""

    model: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    capacity: int
    """Maximum number of tokens, prompt and output, that one sequence can ever hold in the KV cache."""
    kv_tokens: int = 0
    """Tokens that the KV cache holds in sequences of full length."""
    startup: dict[str, float] = {}
    """Seconds by stage of the engine's start."""
    paused: Literal["", PauseMode] = ""
    """Pause mode of the engine, for a client that was not there when it was paused."""
    adapters: list[Adapter] = []
    """Loaded adapters, for a client that was not there when they were loaded."""
    pooling: PoolingInfo = NO_POOLING
    """What the model makes of whole texts."""
    hears: bool = False
    """Whether each prompt has a `source`, which an encoder reads."""


EndReason = Literal["stop", "length", "abort", "error", "repetition", "timeout", "refused"]


class End(Message, frozen=True):
    """The one last message of a sequence.

    Attributes:
        reason: `stop` by a token of `Add.stop_ids`, `length`, `repetition`, `timeout`, `abort`, `error`, or `refused`:
            an error that the same request would meet again, since it asks for what cannot be done.
        message: For `error` and `refused`: what failed, safe to show to the client.
        queued_s, prefill_s, decode_s: Seconds waiting, from first plan to first token, and from there to the end.
        cached_tokens: Prompt tokens found in the prefix cache, or shared with the sequence it forked from.
        vector: What a pooled request has asked for, whose reason is `stop` then: float32, little-endian, in C order.
        vector_shape: Its shape: [dim], or [tokens, dim] for tasks with a vector for each token.
    """

    id: int
    reason: EndReason
    message: str = ""
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preemptions: int = 0
    cached_tokens: int = 0
    vector: bytes = b""
    vector_shape: list[int] = []


class StateLoad(Message, frozen=True):
    """The states of sequences of a model whose layers keep any.

    Attributes:
        num_states: States of sequences and checkpoints together.
        free: Those that no sequence holds, with or without a checkpoint.
        checkpoints: Checkpoints that were made since the engine's start.
        skipped: Those that found no free state.
    """

    num_states: int
    free: int
    checkpoints: int
    skipped: int


class DiskLoad(Message, frozen=True):
    """What the prefix cache keeps on disk, and counts since the engine's start: bytes that were written and read, the
    seconds that it took, blocks that could not be read as they were written, or not be written, and blocks that left
    the host before they were."""

    blocks: int
    num_blocks: int
    stored_bytes: int
    loaded_bytes: int
    store_s: float
    load_s: float
    unread: int
    unwritten: int
    left_out: int


class TierLoad(Message, frozen=True):
    """What the prefix cache keeps on the host, and counts since the engine's start: bytes that were copied there and
    back, tokens that the device did not have and those of them that were loaded, blocks that were left out for want of
    room, prefixes that were computed because that was quicker, seconds of loads, and blocks that could not be loaded.
    """

    cached_blocks: int
    stored_bytes: int
    loaded_bytes: int
    query_tokens: int
    hit_tokens: int
    left_out: int
    too_slow: int
    load_s: float = 0.0
    failed_loads: int = 0
    disk: DiskLoad | None = None


class MediaLoad(Message, frozen=True):
    """How many images prompts have brought into steps since the engine's start, and how many of these had vectors
    already."""

    queries: int
    hits: int


class Load(Message, frozen=True):
    """How busy the engine is. API processes use it for metrics and to turn requests away without asking."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    num_blocks: int = 0
    preemptions: int = 0
    """Preemptions since the engine's start."""
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache since the engine's start."""
    prefix_hits: int = 0
    """Tokens looked up in the prefix cache and found, since the engine's start."""
    drafts: int = 0
    """Sequences with draft tokens in a step, since the engine's start."""
    draft_tokens: int = 0
    """Draft tokens since the engine's start."""
    accepted_drafts: list[int] = []
    """Draft tokens that were accepted since the engine's start, by their position in the draft."""
    free_host_blocks: int = 0
    """Free blocks among the host blocks that are ready."""
    num_host_blocks: int = 0
    """All host blocks, ready or not."""
    step: int = 0
    step_ms: float = 0.0
    deferred: int = 0
    """Sequences that wait for a token in flight, or for the prompt they share, and not for room."""
    unwritten_tokens: int = 0
    """Tokens that still fit into the blocks in use: internal fragmentation."""
    block_size: int = 0
    ready_host_blocks: int = 0
    queued_tokens: int = 0
    """Tokens to be computed for waiting sequences: prompts, and outputs of the expected length."""
    queue_delay_s: float = 0.0
    """The smallest waiting time of the sequences that began lately (QueueDelay), while others wait for room; else
    0."""
    tokens_per_s: float = 0.0
    """Tokens that the engine computes, or finds computed, in a second while requests wait; estimated at first. 0 if
    unknown."""
    expected_output: float = EXPECTED_OUTPUT
    """Mean number of tokens that a sequence brings."""
    paused: Literal["", PauseMode] = ""
    """Pause mode; empty if the engine is not paused."""
    running_adapters: list[str] = []
    """Names of the adapters that requests use."""
    retained_blocks: int = 0
    """Free blocks whose contents are kept for sessions that go on."""
    waiting_adapters: list[str] = []
    """Names of the adapters that requests wait for because no slot is free."""
    states: StateLoad | None = None
    """None for a model without states."""
    tier: TierLoad | None = None
    """None without --kv-offloading-size."""
    media: MediaLoad | None = None
    """None for a model that reads text alone."""


class Deltas(_FromEngine, frozen=True):
    """What one step brought to one API process's requests.

    `counts[i]` tokens of the flat `tokens` belong to `ids[i]`; `logprobs`, when not empty, has one entry for each token
    (None where it was not asked for). A sequence's End comes with or after its last tokens.

    Attributes:
        prompt_logprobs: (sequence, log probabilities of its next prompt tokens), from the prompt's second token on; all
            of them come before the output.
        cached_tokens: (sequence, prompt tokens found in the prefix cache), with its first token.
        last_add: `Add.last_id` of the last Add from this process that `load` counts.
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
        step_tokens: Steps counted by their tokens: one bucket for each of STEP_TOKEN_BOUNDS, and one above.
        step_tokens_sum: Tokens of all steps.
        turns: Turns of the loop counted by their processor time: one bucket for each of WORK_BOUNDS_S, and one above.
        turns_sum_s, longest_turn_s: Processor time of all turns, and of the longest.
        last_add: `Add.last_id` of the last Add from this process that `load` counts.
        limit_s: How long the present step may take, in seconds from `last_progress`, before the engine counts as stuck.
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
    """The engine is gone, and no further message of it follows. Sent by the process that saw it die. Its `successor`
    takes its place, None if none does; it was working on the sequences `in_flight`."""

    cause: str
    successor: EngineId | None = None
    in_flight: list[int] = []


FromEngine = Ready | Deltas | Done | Heartbeat | Dead
