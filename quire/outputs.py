"""What `LLM` returns and `AsyncLLM` streams. Plain data; names and meanings are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


@dataclass(frozen=True)
class Logprob:
    """A token's log probability (natural logarithm), its rank (1 = likeliest; None if it is only reported among the
    likeliest) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One sequence drawn for a prompt.

    Attributes:
        index: Which of the request's n sequences this is.
        text: Empty when the tokens were not turned into text.
        token_ids: Token ids of the output.
        cumulative_logprob: Sum over the drawn tokens; None when logprobs were not asked for.
        logprobs: For each token, the drawn and the likeliest tokens by id.
        finish_reason: Why the sequence ended.
        stop_reason: The stop string or the token of `stop_token_ids` that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class RequestOutput:
    """All sequences of one prompt.

    Attributes:
        request_id: Counts up.
        prompt: The prompt's text, if known.
        prompt_token_ids: The tokens that were computed; with `truncate_prompt_tokens` the end of the prompt.
        outputs: The n sequences.
        finished: Whether all sequences have ended; always true in what `LLM` returns.
        prompt_logprobs: For each token of the prompt (None for the first), that token and the likeliest ones by id.
        num_cached_tokens: Tokens of the prompt that the prefix cache had.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class BeamSearchSequence:
    """One sequence that beam search found.

    Attributes:
        tokens: Tokens of the prompt and of the output.
        cum_logprob: Sum of the output tokens' log probabilities.
        text: The text of `tokens`; None without a tokenizer.
        finish_reason: `stop` by an end-of-sequence token, or `length`.
        stop_reason: The end-of-sequence token.
    """

    tokens: list[int]
    cum_logprob: float
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass(frozen=True)
class BeamSearchOutput:
    """The best sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True)
class PoolingOutput:
    """What a model made of a text. `data` is a torch tensor of float32: [dim] or [labels], [tokens, …] for tasks of
    tokens."""

    data: Any


@dataclass(frozen=True)
class EmbeddingOutput:
    """A text's embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the embedding."""
        return len(self.embedding)


@dataclass(frozen=True)
class ClassificationOutput:
    """The probability of each label, in the model's order."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    """How well two texts fit."""

    score: float


Pooled = TypeVar("Pooled", covariant=True)


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[Pooled]):
    """What a model made of one text, or of a pair.

    Attributes:
        request_id: Counts up.
        outputs: The result.
        prompt_token_ids: The tokens that were computed.
        num_cached_tokens: Tokens of them that the prefix cache had.
        finished: Always true.
    """

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True)
class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The embedding of one text."""


@dataclass(frozen=True)
class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The labels' probabilities of one text."""


@dataclass(frozen=True)
class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """How well the texts of one pair fit."""
