"""From API processes to an engine: requests, and commands."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams

DECODING_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no message; the last two come from Python itself."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Encoded as an array of its class's name and its fields."""


CLIENT_SHIFT = 48
"""Request ids are unique over API processes: the bits from this one on are the process's number."""


def queued_tokens(sampling: SamplingParams, prompt_tokens: int, output_tokens: float) -> int:
    """Tokens that a waiting sequence adds to the queue: what is not computed of its prompt, and what it should bring.
    Tokens whose log probabilities are wanted count twice."""
    per_prompt_token = 1 if sampling.prompt_logprobs is None else 2
    per_output_token = 1 if sampling.num_reported is None else 2
    return per_prompt_token * prompt_tokens + per_output_token * max(1, round(output_tokens))


class Fork(msgspec.Struct, frozen=True, array_like=True):
    """Another sequence of an Add's prompt, with an id and a seed of its own. On a replay, `generated` are its tokens
    after the prompt."""

    id: int
    seed: int
    generated: list[int] = []


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter. Its contents identify it, by `digest`, a hash in hex of all that decides what it computes: other
    contents under the same name are another adapter. `path` is the directory of its files."""

    name: str
    path: str
    digest: str


class MediumTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a tower takes: numpy's name of its dtype, its shape, and its elements in C order."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


MediumKind = Literal["image", "audio", "video"]
"""Kinds of media, as vLLM calls them."""


class Medium(msgspec.Struct, frozen=True, array_like=True):
    """An image, a sound or a video as a model's tower takes it, or a sound as an encoder does.

    Attributes:
        digest: sha256 of the pixels and of all settings that made them: equal digests have equal vectors.
        height, width: In pixels, after the image was resized and cut; of a sound, its mels and features.
        count: How many tokens it has, from the first that stands for one of its vectors to the last.
        pixels: [height, width, 3] uint8: red, green and blue, of each frame of a video; empty for towers
            that take `tensors`; of a sound that an encoder reads [height, width] float32.
        rows, columns: How its vectors lie, in models whose positions tell rows and columns (M-RoPE); 0 in others.
        tensors: What the tower takes in place of pixels, by name.
        places: [vectors] int32, which of the tokens stand for a vector each; empty: all of them do.
        text: [tokens] int32, what takes the place of its placeholder in a prompt: the tokens that stand for vectors,
            and those before, among and behind them; empty: only tokens that stand for vectors.
        kind: What it is: an image, a sound or a video.
        times: [slices] int32, when each slice of a video begins, in positions behind its first one; each has `rows` and
            `columns`. With `places`, texts between slices tell their times, and these are 0. Empty: an image.
        two_sided: Whether the tokens that stand for its vectors see one another, those behind them as well.
    """

    digest: bytes
    height: int
    width: int
    count: int
    pixels: bytes
    rows: int = 0
    columns: int = 0
    tensors: dict[str, MediumTensor] = {}
    places: bytes = b""
    text: bytes = b""
    kind: MediumKind = "image"
    times: bytes = b""
    two_sided: bool = False

    @property
    def num_vectors(self) -> int:
        """How many of its tokens stand for a vector."""
        return len(self.places) // 4 or self.count

    @property
    def num_bytes(self) -> int:
        """How many bytes its pixels and tensors have."""
        return len(self.pixels) + sum(len(each.content) for each in self.tensors.values())


class MediaSpan(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a prompt that stand for an image, from `start` on, with those that stand among them."""

    start: int
    medium: Medium

    @property
    def end(self) -> int:
        return self.start + self.medium.count


class TimestampRules(msgspec.Struct, frozen=True, array_like=True):
    """Where an output may have timestamps, which are the last tokens of the vocabulary (Radford et al. 2022, section
    2.3): in pairs around what was said, never earlier than the one before, and at the beginning.

    Attributes:
        begin: The first timestamp.
        end: The token that ends the output. Tokens below it are text.
        barred: The token that says that there are no timestamps.
        latest: Timestamps behind this one are not the first; None: any may be.
    """

    begin: int
    end: int
    barred: int
    latest: int | None = None


class TranscriptRules(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens a transcript may have.

    Attributes:
        never: Tokens that are not sampled.
        not_first: Tokens that are not sampled first.
        timestamps: The rules of timestamps; None: there are none.
    """

    never: list[int] = []
    not_first: list[int] = []
    timestamps: TimestampRules | None = None

    @property
    def tokens(self) -> list[int]:
        """All tokens that are named."""
        own = self.timestamps
        named = [] if own is None else [own.begin, own.end, own.barred]
        return [*self.never, *self.not_first, *named]


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """How long a sequence may reason, and the tokens that show when it does.

    Attributes:
        tokens: Maximum number of tokens of reasoning; after them, what ends it is sampled.
        start: Tokens that open reasoning.
        ends: Token sequences that end it. The first one is sampled when the budget is spent.
        again: Whether reasoning may begin again after it has ended, on what is left of the budget.
        opened: Whether the prompt has opened it; None where the prompt's last tokens tell.
    """

    tokens: int
    start: list[int]
    ends: list[list[int]]
    again: bool = False
    opened: bool | None = None


class Add(Message, frozen=True):
    """The sequences of one prompt, new or replayed after an engine's death. Each of them gets exactly one End.

    Attributes:
        id: Of the first sequence. Unique; `id >> CLIENT_SHIFT` is the API process its Deltas go to.
        tokens: The prompt, followed on a replay by the tokens that the first sequence has generated.
        prompt_len: How many of `tokens` are the prompt; the rest counts against `max_tokens`.
        sampling: What the user asked for, with `max_tokens` resolved to a number.
        stop_ids: Tokens that end the sequence: the model's end-of-sequence tokens and `sampling.stop_token_ids`.
        seed: Of the counter-based random numbers; the client picks one when the user gave none. In [0, 2**64).
        arrival: Seconds on the machine-wide monotonic clock.
        priority: Lower goes first, under `--scheduling-policy priority`.
        cache_salt: Cached prefixes are shared only between requests with equal salts.
        forks: The other sequences, which share the first one's prompt blocks.
        bad_words: `sampling.bad_words` as tokens: behind the other tokens of a word, its last one is not sampled.
        grammar: Text of the checked grammar that the output must follow, made by `quire.engine.structured_output`;
            empty for any output.
        thinking: How long each sequence may reason; None for no limit.
        fork_of: Set by `sequences` and never sent: the prompt's first sequence, for all others.
        deadline: When unfinished sequences end with what they have; on the clock of `arrival`.
        tenant: Waiting requests of different tenants are served in turn.
        adapter: Changes the base model for these sequences.
        alone: Until each of its sequences has brought this many tokens, the engine works on no other prompt.
        pooling: What to make of the prompt in place of tokens, with its task resolved. Then there is one sequence,
            `sampling` is NO_SAMPLING, and the End has the vector.
        token_types: One byte for each token of the prompt, its type (0: the first text of a pair, 1: the second);
            empty: all are 0.
        prompt_skip: The first tokens of the prompt that means and maxima leave out: an instruction whose tokens are
            not the text's (`include_prompt` of sentence-transformers' Pooling is false).
        media: The prompt's images, in the order of their places, which do not overlap.
        source: What the encoder reads, in models whose layers attend to an encoder's states.
        transcript: The rules of a transcript's tokens; None: it is none.
        retain_s: Seconds after its end for which the prefix cache keeps its blocks, as far as its share goes.
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
    alone: int = 0
    pooling: PoolingParams | None = None
    token_types: bytes = b""
    prompt_skip: int = 0
    media: list[MediaSpan] = []
    retain_s: float = 0.0
    source: Medium | None = None
    transcript: TranscriptRules | None = None

    @property
    def prompt_id(self) -> int:
        """The id of the first sequence of its prompt."""
        return self.id if self.fork_of is None else self.fork_of

    @property
    def last_id(self) -> int:
        """The highest of its sequences' ids, which clients count upwards."""
        return self.forks[-1].id if self.forks else self.id

    def queued_tokens(self, expected_output: float) -> int:
        """Tokens that all its sequences add to a queue."""
        return self._queued(len(self.tokens), expected_output) + len(self.forks) * self._queued(1, expected_output)

    def _queued(self, prompt_tokens: int, expected_output: float) -> int:
        output = min(self.sampling.max_tokens or 0, expected_output)
        return queued_tokens(self.sampling, prompt_tokens, output)

    def sequences(self) -> list[Add]:
        """One Add for each sequence, this one first. Forks share its lists, so nobody may change those."""
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


class Abort(Message, frozen=True):
    """Stop these sequences; unknown ids are ignored."""

    ids: list[int]


PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of admitted requests at a pause: they end, they finish first, or they keep their place and wait."""


NONE_SEEN = -1
"""Number of the last frame of somebody who has seen no frame of the live picture."""


class Control(Message, frozen=True):
    """A command, answered by exactly one Done. Actions: `drain`, `counts`, `reset_prefix_cache`, `is_paused`, `resume`,
    `pause:` with a PauseMode, `load_adapter` of `name` and `path`, `unload_adapter` of `name`, and `frame` for one of
    the live picture, newer than the one whose number was `seen`."""

    id: int
    action: str
    value: dict[str, str] = {}


class ClientHeartbeat(Message, frozen=True):
    """API process `client` is alive; without heartbeats its requests are aborted."""

    client: int


class ClientGone(Message, frozen=True):
    """API process `client` is dead, and its number is not used again: its requests are aborted."""

    client: int


ToEngine = Add | Abort | Control | ClientHeartbeat | ClientGone
