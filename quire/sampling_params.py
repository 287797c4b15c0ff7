"""How a request wants tokens to be sampled: plain data, checked when built. Names, defaults and rules are vLLM's."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from enum import Enum
from typing import Any

import msgspec

from quire.errors import RequestError, UnsupportedField, did_you_mean
from quire.structured_outputs_params import GuidedDecodingParams as GuidedDecodingParams
from quire.structured_outputs_params import StructuredOutputsParams as StructuredOutputsParams
from quire.validation import boolean, integer, number, number_between, texts, token_ids

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4_096
"""Maximum characters of a stop string."""
MAX_STOP_TOKEN_IDS = 1_024
MAX_N = 128
MAX_BAD_WORDS = 1_024
MAX_BAD_WORD_LENGTH = 256
"""Maximum characters of a bad word."""
MAX_LOGIT_BIAS = 16_384
MAX_ALLOWED_TOKEN_IDS = 2**18 + 2**14
"""The largest vocabularies have 262,208 tokens."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_PATTERN = 1_024
MAX_EXTRA_BYTES = 2**20
"""Maximum bytes of `extra_args` as a message."""
GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy decoding."""
MIN_TEMPERATURE = 1e-2
"""Temperatures from GREEDY_BELOW to this are raised to it, because logits / t would overflow."""
LARGEST_EFFECT = 1e15
"""Larger temperatures, repetition penalties and their divisors, and biases count as this: the result is the same, and
no logit of a sound model leaves fp32, even if all of them meet."""
WHOLE_VOCABULARY = -1
"""A number of log probabilities that asks for all of them."""
MAX_BEAM_WIDTH = 128
MAX_LENGTH_PENALTY = 16.0
"""Lengths to this power are still finite numbers."""


def check_num_biases(number: int) -> None:
    """Raise RequestError if `logit_bias` has too many entries."""
    if number > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens, got {number}.", param="logit_bias")


class RequestOutputKind(Enum):
    """What each output of an `AsyncLLM` has: everything so far, what is new, or nothing before the end. `LLM` always
    returns finished outputs."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class RepetitionDetectionParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When an output that repeats itself is ended.

    Attributes:
        max_pattern_size, min_pattern_size: Tokens of a pattern that counts.
        min_count: How often in a row the pattern must stand at the output's end.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        integer("repetition_detection.max_pattern_size", self.max_pattern_size, 1, MAX_PATTERN)
        integer("repetition_detection.min_pattern_size", self.min_pattern_size, 1, self.max_pattern_size)
        integer("repetition_detection.min_count", self.min_count, 2)


class KnownNames(type(msgspec.Struct)):  # type: ignore[misc]  # msgspec's own metaclass
    """Suggests the parameter that was probably meant."""

    def __call__(cls, *values: Any, **named: Any) -> Any:
        if values:
            example = "max_tokens=64" if "max_tokens" in cls.__struct_fields__ else "dimensions=256"
            raise TypeError(f"{cls.__name__} takes names alone, such as {cls.__name__}({example}).")
        try:
            return super().__call__(*values, **named)
        except TypeError:
            for name in named:
                if name not in cls.__struct_fields__:
                    hint = did_you_mean(name, cls.__struct_fields__)
                    raise TypeError(f"{cls.__name__} has no parameter '{name}'.{hint}") from None
            raise


class SamplingParams(
    msgspec.Struct, metaclass=KnownNames, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """How tokens are drawn and when a sequence ends.

    Attributes:
        n: Number of sequences for the prompt, each drawn on its own; 1 if greedy.
        presence_penalty: Subtracted from the logit of every token that the output has, in [-2, 2].
        frequency_penalty: Subtracted from a token's logit for each time that the output has it, in [-2, 2].
        repetition_penalty: Divides positive and multiplies negative logits of tokens that prompt or output have.
        temperature: Divides the logits; 0 means greedy.
        top_p: Draw from the smallest set of tokens whose probabilities reach this sum, in (0, 1].
        top_k: Draw from the k likeliest tokens; 0 or -1 for all.
        min_p: Draw from tokens that are at least this fraction as likely as the likeliest one, in [0, 1].
        seed: With one seed, a request always draws the same random numbers, whatever else is in the batch.
        stop: Strings that end the sequence; not part of the text unless `include_stop_str_in_output`.
        stop_token_ids: Token ids that end the sequence.
        ignore_eos: Go on past the model's end-of-sequence tokens.
        max_tokens: Maximum tokens of the output; None for all that the context leaves.
        min_tokens: No end of sequence and no stop token before this many tokens.
        logprobs: Return the log probabilities of this many most likely tokens and of the drawn one; -1 for all.
        prompt_logprobs: The same for each token of the prompt, whose blocks are then not taken from the prefix cache.
        logprob_token_ids: Return the log probabilities of these tokens in place of the likeliest ones.
        flat_logprobs: Another container for log probabilities; only False is supported.
        logit_bias: Added to the logits of these tokens.
        allowed_token_ids: No other token is drawn.
        bad_words: Texts that the output never has, alone or after a space.
        truncate_prompt_tokens: Use only this many last tokens of the prompt; -1 for as many as fit.
        detokenize: Turn tokens into text; off for token-only use.
        skip_special_tokens: Leave special tokens out of the text.
        spaces_between_special_tokens: Separate adjacent special tokens by a space (slow tokenizers' habit);
            only True is supported.
        include_stop_str_in_output: Keep the stop string that ended the text.
        output_kind: What each output has, see RequestOutputKind.
        repetition_detection: End an output that repeats itself.
        structured_outputs: The form that the output must have.
        guided_decoding: Older name of `structured_outputs`.
        thinking_token_budget: Maximum tokens of reasoning, after which the answer begins; -1 for no limit.
        skip_reading_prefix_cache: Compute the whole prompt, whatever is cached.
        extra_args: Arguments for logits processors.

    Raises:
        RequestError: A value is out of its range; `param` names the field.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
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
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    repetition_detection: RepetitionDetectionParams | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    skip_reading_prefix_cache: bool | None = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._use_newer_names()
        self._check_types()
        self._check_supported()
        self._check_counts()
        self._check_shape_of_distribution()
        self._check_single_tokens()
        self._check_reports()
        self._check_words()
        if self.extra_args:
            self._check_extra_args(self.extra_args)

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Make parameters, where None stands for a default; of `max_tokens` it means no limit."""
        optional = {"max_tokens"} | {name for name, default in _DEFAULTS.items() if default is None}
        return cls(**{n: v for n, v in values.items() if v is not None or n in optional or n not in _DEFAULTS})

    def clone(self) -> SamplingParams:
        """A copy, which shares no list with this one."""
        return copy.deepcopy(self)

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

    @property
    def penalizes(self) -> bool:
        """Whether tokens that a sequence already has change what comes next."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def num_reported(self) -> int | None:
        """For how many tokens beside the drawn one log probabilities are reported; None for no log probabilities."""
        return self.logprobs if self.logprob_token_ids is None else len(self.logprob_token_ids)

    def named_token_ids(self) -> Iterator[tuple[str, Collection[int]]]:
        """All token ids that are named in a field, by the field's name; without fields that name none."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
            if ids := getattr(self, name):
                yield name, ids

    def _use_newer_names(self) -> None:
        if self.guided_decoding is None:
            return
        if self.structured_outputs is not None:
            raise RequestError(
                "guided_decoding is the older name of structured_outputs: send one of them.", param="guided_decoding"
            )
        msgspec.structs.force_setattr(self, "structured_outputs", self.guided_decoding)
        msgspec.structs.force_setattr(self, "guided_decoding", None)

    def _check_types(self) -> None:
        """Check the types of fields that no other check reads."""
        for name in _BOOLEANS:
            boolean(name, getattr(self, name))
        if self.skip_reading_prefix_cache is not None:
            boolean("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
        if self.stop is not None and not isinstance(self.stop, str):
            texts("stop", self.stop)
        if self.bad_words is not None:
            texts("bad_words", self.bad_words)
        for name, kind in _OBJECTS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and not (value is None and name != "output_kind"):
                got = type(value).__name__
                raise RequestError(f"{name} must be a {kind.__name__}, got {got}.", param=name)

    def _check_supported(self) -> None:
        if not self.spaces_between_special_tokens:
            raise RequestError(
                "spaces_between_special_tokens=false is not supported: leave it out.",
                param="spaces_between_special_tokens",
            )
        if self.flat_logprobs:
            raise UnsupportedField("flat_logprobs")

    def _check_counts(self) -> None:
        integer("n", self.n, 1, MAX_N)
        if self.n > 1 and number("temperature", self.temperature) < GREEDY_BELOW:
            raise RequestError("n must be 1 when temperature is 0: all sequences would be the same.", param="n")
        if self.max_tokens is not None:
            integer("max_tokens", self.max_tokens, 1)
        integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).", param="min_tokens"
            )
        if self.seed is not None:
            integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.thinking_token_budget is not None:
            integer("thinking_token_budget", self.thinking_token_budget, -1)
        if self.truncate_prompt_tokens not in (None, -1):
            integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1)

    def _check_shape_of_distribution(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            number_between(name, getattr(self, name), -2, 2)
        if number("repetition_penalty", self.repetition_penalty) <= 0:
            raise RequestError(
                f"repetition_penalty must be greater than 0, got {self.repetition_penalty}.", param="repetition_penalty"
            )
        temperature = number("temperature", self.temperature)
        if temperature < 0:
            raise RequestError(f"temperature must be at least 0, got {temperature}.", param="temperature")
        if not 0 < number("top_p", self.top_p) <= 1:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}.", param="top_p")
        integer("top_k", self.top_k, -1)
        number_between("min_p", self.min_p, 0, 1)

    def _check_single_tokens(self) -> None:
        if self.stop_token_ids is not None:
            token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids must not be empty: no token could be drawn.",
                                   param="allowed_token_ids")  # fmt: skip
        bias = self.logit_bias or {}
        check_num_biases(len(bias))
        for token, value in bias.items():
            integer("logit_bias", token, 0)
            number("logit_bias", value)

    def _check_reports(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), WHOLE_VOCABULARY)
        named = self.logprob_token_ids
        if named is not None:
            token_ids("logprob_token_ids", named, MAX_LOGPROB_TOKEN_IDS)
            if self.logprobs is not None and self.logprobs != len(named):
                raise RequestError(
                    f"logprobs ({self.logprobs}) must be left out or be the length of logprob_token_ids "
                    f"({len(named)}).",
                    param="logprobs",
                )

    def _check_words(self) -> None:
        stops, bad = self.stop_strings, self.bad_words or []
        if len(stops) > MAX_STOP_STRINGS:
            raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(stops)}.", param="stop")
        if not all(isinstance(s, str) and s for s in stops):
            raise RequestError("stop strings must not be empty.", param="stop")
        if any(len(stop) > MAX_STOP_LENGTH for stop in stops):
            raise RequestError(f"stop strings must be of at most {MAX_STOP_LENGTH} characters each.", param="stop")
        if stops and not self.detokenize:
            raise RequestError("stop strings need detokenize=True.", param="stop")
        if len(bad) > MAX_BAD_WORDS:
            raise RequestError(f"bad_words takes at most {MAX_BAD_WORDS} words, got {len(bad)}.", param="bad_words")
        if not all(isinstance(word, str) and word.strip() for word in bad):
            raise RequestError("bad_words must be texts that are not empty.", param="bad_words")
        if any(len(word) > MAX_BAD_WORD_LENGTH for word in bad):
            raise RequestError(
                f"bad_words must be of at most {MAX_BAD_WORD_LENGTH} characters each.", param="bad_words"
            )

    def _check_extra_args(self, arguments: dict[str, Any]) -> None:
        """Refuse what messages between processes cannot hold. Offline there are none, so any object may be passed."""
        try:
            size = len(msgspec.msgpack.encode(arguments))
        except TypeError:
            return
        except (OverflowError, UnicodeEncodeError, RecursionError) as error:
            reason = {OverflowError: "an integer beyond 64 bits", UnicodeEncodeError: "a text that is no valid Unicode"}
            why = reason.get(type(error), "too many levels")
            raise RequestError(f"extra_args (vllm_xargs) must not have {why}.", param="extra_args") from None
        if size > MAX_EXTRA_BYTES:
            raise RequestError(f"extra_args (vllm_xargs) may have at most {MAX_EXTRA_BYTES} bytes.", param="extra_args")


_DEFAULTS: dict[str, Any] = dict(zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True))
_BOOLEANS = (
    "ignore_eos", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output",
)  # fmt: skip
_OBJECTS: dict[str, type] = {
    "logit_bias": dict,
    "extra_args": dict,
    "output_kind": RequestOutputKind,
    "repetition_detection": RepetitionDetectionParams,
    "structured_outputs": StructuredOutputsParams,
}


class BeamSearchParams(msgspec.Struct, metaclass=KnownNames, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request asks of beam search.

    Attributes:
        beam_width: Number of beams, and of sequences that are returned.
        max_tokens: Maximum tokens of the output.
        ignore_eos: Go on past the model's end-of-sequence tokens.
        temperature: Has no effect on which sequences are found, as in vLLM.
        length_penalty: Above 0 favours long sequences, below 0 short ones.
        include_stop_str_in_output: Keep the end-of-sequence token.

    Raises:
        RequestError: A value is out of its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        integer("max_tokens", self.max_tokens, 1)
        number_between("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            boolean(name, getattr(self, name))
        SamplingParams(temperature=self.temperature)

    def step(self, num_reported: int = 0) -> SamplingParams:
        """What each beam asks of the engine in each step, with log probabilities of at least `num_reported` tokens."""
        asked = max(2 * self.beam_width, num_reported)
        return SamplingParams(temperature=0.0, max_tokens=1, logprobs=asked, detokenize=False)
