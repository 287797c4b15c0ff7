"""From API processes to an engine: requests, and commands."""

from __future__ import annotations

from typing import Literal

import msgspec

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
