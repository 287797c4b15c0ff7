"""What a request asks of sampling: plain data, checked when built.

Knows nothing about HTTP, tokenizers or tensors. Field names, defaults and rules are vLLM's.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from quire.errors import RequestError

MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 1_024
MAX_N = 128
GREEDY_BELOW = 1e-5
"""A temperature under this means greedy decoding."""
MIN_TEMPERATURE = 1e-2
"""Temperatures between GREEDY_BELOW and this are raised to it: logits / t would overflow."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn and when a sequence ends.

    Attributes:
        n: Number of sequences for the prompt, each drawn on its own; 1 when greedy.
        temperature: Divides the logits; 0 means greedy.
        top_p: Smallest set of tokens whose probabilities reach this sum, in (0, 1].
        top_k: The k most likely tokens; 0 or -1 for all.
        min_p: Tokens at least this fraction as likely as the likeliest one, in [0, 1].
        seed: Same request and seed draw the same random numbers, whatever else is in the batch.
        stop: Strings that end the sequence; not part of the text unless `include_stop_str_in_output`.
        stop_token_ids: Token ids that end the sequence.
        ignore_eos: Go on past the model's end-of-sequence tokens.
        max_tokens: Longest output in tokens; None for all that the context leaves.
        min_tokens: No end of sequence and no stop token before this many tokens.
        logprobs: Return the log probabilities of this many most likely tokens and of the drawn one.
        detokenize: Turn tokens into text; off for token-only use.
        skip_special_tokens: Leave special tokens out of the text.
        spaces_between_special_tokens: Separate adjacent special tokens by a space (slow tokenizers' habit);
            only True is supported.
        include_stop_str_in_output: Keep the stop string that ended the text.

    Raises:
        RequestError: A value is out of its range; `param` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_shape_of_distribution()
        self._check_stops()

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, however they were given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _check_counts(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        if self.n > 1 and _number("temperature", self.temperature) < GREEDY_BELOW:
            raise RequestError("n must be 1 when temperature is 0: all sequences would be the same.", param="n")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).", param="min_tokens"
            )
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)

    def _check_shape_of_distribution(self) -> None:
        temperature = _number("temperature", self.temperature)
        if temperature < 0:
            raise RequestError(f"temperature must be at least 0, got {temperature}.", param="temperature")
        if not 0 < _number("top_p", self.top_p) <= 1:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}.", param="top_p")
        _integer("top_k", self.top_k, -1)
        if not 0 <= _number("min_p", self.min_p) <= 1:
            raise RequestError(f"min_p must be in [0, 1], got {self.min_p}.", param="min_p")
        if not self.spaces_between_special_tokens:
            raise RequestError(
                "spaces_between_special_tokens=false is not supported: leave it out.",
                param="spaces_between_special_tokens",
            )

    def _check_stops(self) -> None:
        stops = self.stop_strings
        if len(stops) > MAX_STOP_STRINGS:
            raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(stops)}.", param="stop")
        if not all(isinstance(s, str) and s for s in stops):
            raise RequestError("stop strings must not be empty.", param="stop")
        if stops and not self.detokenize:
            raise RequestError("stop strings need detokenize=True.", param="stop")
        ids = self.stop_token_ids or []
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, got {len(ids)}.", param="stop_token_ids"
            )
        for token in ids:
            _integer("stop_token_ids", token, 0)


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}.", param=name)
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} must be {bound}, got {value}.", param=name)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, got {value!r}.", param=name)
    return float(value)
