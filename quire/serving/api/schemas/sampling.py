"""The fields that generating endpoints share, and the SamplingParams or BeamSearchParams that they become."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from quire.errors import RequestError
from quire.foundation.config import ServerConfig
from quire.sampling_params import (
    MAX_BEAM_WIDTH,
    MAX_N,
    BeamSearchParams,
    RepetitionDetectionParams,
    SamplingParams,
    check_num_biases,
)
from quire.serving.api.schemas.known_fields import Part, optional
from quire.serving.api.schemas.output_form import OutputFormFields
from quire.serving.api.schemas.queue_fields import QueueFields
from quire.serving.api.schemas.retention import PromptCacheOptions, Retention, retention_s
from quire.serving.api.token_fields import PromptFields, TokenNames
from quire.text.generation_config import DefaultSampling
from quire.text.tokenizer import Tokenizer
from quire.validation import integer

Metadata = Annotated[
    dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
    Field(max_length=16),
]
"""Up to 16 texts of 512 characters, under names of up to 64: OpenAI's bounds."""


MAX_BIAS = 100.0
"""OpenAI's limit on logit_bias, both ways."""
_NOT_FOR_BEAM_SEARCH: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    "vllm_xargs": ({},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
"""Fields that beam search cannot follow, with the values (beside null) that ask for nothing."""
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


class StreamOptions(Part):
    """What a stream reports beside the text."""

    include_usage: bool | None = optional("A last chunk with the token counts.")
    continuous_usage_stats: bool | None = optional(
        "Token counts of its choice so far in every chunk; with include_usage only."
    )
    include_obfuscation: bool | None = optional("Ignored: nothing is padded here.")


class RequestFields(QueueFields):
    """Fields beside the prompt and the sampling parameters."""

    stream: bool | None = optional("Server-sent events.")
    stream_options: StreamOptions | None = None
    session_id: str | None = optional("Whose turn this is: its prefix stays cached until the next one.")
    prompt_cache_key: str | None = optional("As session_id.")
    prompt_cache_options: PromptCacheOptions | None = optional("How long the prefix stays cached.")
    prompt_cache_retention: Retention | None = optional("Older form of prompt_cache_options.ttl.")

    def queue_options(self) -> dict[str, Any]:
        """What QueueFields has, and for how long the blocks of the request are wanted; raises RequestError as well."""
        names = (self.session_id, self.prompt_cache_key)
        wanted = retention_s(*names, self.prompt_cache_options, self.prompt_cache_retention)
        return super().queue_options() | {"retain_s": wanted}

    def check_stream_options(self) -> None:
        """Raises RequestError for stream_options without stream."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true.", param="stream_options")

    def fill_in(self, server: ServerConfig) -> None:
        """Take over what the server reports unasked."""
        if server.enable_force_include_usage and self.stream:
            options = self.stream_options or StreamOptions()
            self.stream_options = options.model_copy(update={"include_usage": True})

    @property
    def streams_usage(self) -> tuple[bool, bool]:
        """Whether token counts are in a last chunk, and in every chunk."""
        options = self.stream_options or StreamOptions()
        return bool(options.include_usage), bool(options.include_usage and options.continuous_usage_stats)


class RepetitionDetection(Part):
    """When an answer that repeats itself is ended."""

    max_pattern_size: int = Field(description="Longest pattern, in tokens.")
    min_pattern_size: int | None = optional("Default 1.")
    min_count: int | None = optional("How often it must come in a row. Default 2.")

    def params(self) -> RepetitionDetectionParams:
        """Check these fields and convert them to RepetitionDetectionParams."""
        return RepetitionDetectionParams(**self.model_dump(exclude_none=True))


class SamplingFields(RequestFields, OutputFormFields):
    """How tokens are sampled and reported; what is left open comes from the model's defaults."""

    n: int | None = optional("Number of answers.")
    best_of: int | None = optional("Must be n: every answer that is sampled is returned.")
    presence_penalty: float | None = optional("-2 to 2, for each token the answer has.")
    frequency_penalty: float | None = optional("-2 to 2, for each time the answer has it.")
    repetition_penalty: float | None = optional("Above 1: fewer tokens of prompt and answer.")
    temperature: float | None = optional("0 is greedy.")
    top_p: float | None = None
    top_k: int | None = optional("0 or -1 for all tokens.")
    min_p: float | None = None
    seed: int | None = optional("The same seed samples the same random numbers.")
    stop: str | list[str] | None = optional("Strings that end the answer.")
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = optional("By token id; held within -100 and 100.")
    allowed_token_ids: list[int] | None = optional("No other token is sampled.")
    bad_words: list[str] | None = optional("Texts that the answer must not have.")
    use_beam_search: bool | None = optional("Return the n likeliest answers of n beams.")
    length_penalty: float | None = optional("Of beam search: above 0 favours long answers.")
    prompt_logprobs: int | None = optional("Log probabilities of the prompt's tokens.")
    logprob_token_ids: list[int] | None = optional("Report these tokens' log probabilities.")
    truncate_prompt_tokens: int | None = optional("The prompt's last so many; -1: what fits.")
    truncation_side: Literal["left", "right"] | None = optional(
        "Which end truncate_prompt_tokens cuts off. Default left."
    )
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: int | None = optional("Most tokens of reasoning; then it is ended.")
    vllm_xargs: dict[str, Any] | None = optional("For the server's logits processors.")
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = optional("Also return prompt_token_ids, and the answer's token_ids.")
    return_tokens_as_token_ids: bool | None = optional("Log probabilities name tokens by id: 'token_id:123'.")

    def fill_in(self, server: ServerConfig) -> None:
        super().fill_in(server)
        if server.return_tokens_as_token_ids and self.return_tokens_as_token_ids is None:
            self.return_tokens_as_token_ids = True

    def sampling(self, defaults: DefaultSampling, *, text: bool, **more: Any) -> SamplingParams:
        """Checked parameters, with what this endpoint sets in `more`; raises RequestError if a value is out of its
        range.

        For beam search these are the prompt's: they say whether it fits, and how it is truncated.
        """
        self._check_combinations()
        names = SamplingParams.__struct_fields__
        given = {name: getattr(self, name) for name in names if name in type(self).model_fields}
        given |= {"logit_bias": self._logit_bias(), "extra_args": self.vllm_xargs}
        given["structured_outputs"] = self.output_form()
        given["repetition_detection"] = self.repetition_detection and self.repetition_detection.params()
        if self.use_beam_search:
            given["n"] = 1  # each step asks for one token of each beam
        params = defaults.fill({name: value for name, value in given.items() if name not in more})
        return SamplingParams(**params, **more, detokenize=text)

    def beam_search(self, max_tokens: int) -> BeamSearchParams:
        """Checked parameters of a beam search; `n` is the number of beams and of answers."""
        return BeamSearchParams(
            beam_width=self.num_sequences,
            max_tokens=max_tokens,
            ignore_eos=bool(self.ignore_eos),
            temperature=self.temperature or 0.0,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
        )

    @property
    def num_sequences(self) -> int:
        """Sequences of each prompt. Raises RequestError for a wrong `n` before anything is priced by it."""
        return integer("n", 1 if self.n is None else self.n, 1, MAX_BEAM_WIDTH if self.use_beam_search else MAX_N)

    @property
    def held(self) -> bool:
        """Whether the output is held until all of it is known."""
        return not self.stream or bool(self.use_beam_search)

    def options(self) -> dict[str, Any]:
        """Arguments of `EngineSession.add_request` beside prompts, parameters and ChatService.output_options."""
        return self.queue_options() | {"truncation_side": self.truncation_side or "left"}

    def kept_tokens(self, longest: int) -> tuple[int, Literal["left", "right"]] | None:
        """How much of a prompt counts, see PromptRenderer.encode; None for all of it."""
        keep = self.truncate_prompt_tokens
        if keep is None:
            return None
        return (keep if 0 < keep <= longest else longest), self.truncation_side or "left"

    def token_names(self, tokenizer: Tokenizer | None) -> TokenNames:
        """How log probabilities name tokens."""
        return TokenNames(tokenizer, as_ids=bool(self.return_tokens_as_token_ids))

    def prompt_fields(self, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer | None) -> PromptFields:
        """What the response says about the prompts, which are token ids as the engine got them."""
        return PromptFields(
            prompts,
            self.n or 1,
            tokenizer,
            show_logprobs=self.prompt_logprobs is not None,
            show_token_ids=bool(self.return_token_ids),
        )

    def _check_combinations(self) -> None:
        if self.best_of not in (None, self.n or 1):
            raise RequestError(f"best_of must be n ({self.n or 1}), got {self.best_of}.", param="best_of")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs cannot be streamed: leave stream out.", param="prompt_logprobs")
        if self.guided_whitespace_pattern is not None and self.guided_json is None:
            raise RequestError("guided_whitespace_pattern needs guided_json.", param="guided_whitespace_pattern")
        if self.use_beam_search:
            self._check_beam_search()
        elif self.length_penalty not in (None, 1.0):
            raise RequestError("length_penalty needs use_beam_search=true.", param="length_penalty")

    def _check_beam_search(self) -> None:
        asked = None
        for name, neutral in _NOT_FOR_BEAM_SEARCH.items():
            if (value := getattr(self, name)) is not None and value not in neutral:
                asked = name
        if self.response_format is not None and self.response_format.type != "text":
            asked = "response_format"
        if asked is not None:
            raise RequestError(f"{asked} cannot be combined with use_beam_search: leave it out.", param=asked)

    def _logit_bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        check_num_biases(len(self.logit_bias))
        wrong = next((name for name in self.logit_bias if not _TOKEN_ID.fullmatch(name)), None)
        if wrong is not None:
            raise RequestError(f"logit_bias: '{wrong[:64]}' is not a token id.", param="logit_bias")
        return {int(name): max(-MAX_BIAS, min(MAX_BIAS, value)) for name, value in self.logit_bias.items()}
