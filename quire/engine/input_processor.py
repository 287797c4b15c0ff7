"""From token ids and SamplingParams to the Adds of a request: assigns ids and seeds, resolves and checks limits.

Used by the API server and by `LLM`, so both refuse the same things with the same words. Knows nothing about text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from quire.engine.pooling_requests import resolve_pooling
from quire.errors import ContextLengthError, RequestError
from quire.foundation.clock import Clock
from quire.foundation.config.scheduler import Policy
from quire.foundation.messages.from_engine import Ready
from quire.foundation.messages.to_engine import (
    CLIENT_SHIFT,
    Adapter,
    Add,
    Fork,
    MediaSpan,
    Medium,
    ThinkingBudget,
    TranscriptRules,
)
from quire.pooling_params import NO_SAMPLING, PoolingParams
from quire.sampling_params import WHOLE_VOCABULARY, SamplingParams
from quire.validation import integer

_NO_TEXT = (
    "This model makes vectors or labels of texts, and generates none: use /v1/embeddings, /pooling, /classify, /score "
    "or /rerank."
)
_ONLY_HEARS = (
    "This model writes what it hears, and goes on with no text: send audio to /v1/audio/transcriptions or "
    "/v1/audio/translations."
)
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request: choice 0 has the request's own, the others derive from it by splitmix64
    (Steele, Lea, Flood 2014)."""
    if index == 0:
        return seed & _MASK
    z = (seed + index * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class InputProcessor:
    """Makes Adds for one client of one engine.

    Args:
        max_logprobs: Largest number of log probabilities that a request may ask for; -1 for no limit.
        new_seed: Returns a fresh seed, for requests that bring none.
    """

    def __init__(
        self,
        number: int,
        ready: Ready,
        eos_ids: Sequence[int],
        max_logprobs: int,
        policy: Policy,
        clock: Clock,
        new_seed: Callable[[], int],
        *,
        takes_extra_args: bool = False,
    ) -> None:
        self._ids = (number << CLIENT_SHIFT | i for i in itertools.count(1))
        self._ready = ready
        self._eos_ids = tuple(token for token in eos_ids if token < ready.vocab_size)
        self._max_logprobs = max_logprobs
        self._policy = policy
        self._clock = clock
        self._new_seed = new_seed
        self._takes_extra_args = takes_extra_args

    def replace_engine(self, ready: Ready) -> None:
        """Go on with another engine in place of the one before; ids go on as well."""
        self._ready = ready

    def check_generates(self) -> None:
        """Raises a RequestError if the engines generate no text."""
        if not self._ready.pooling.generates:
            raise RequestError(_NO_TEXT, param="model")

    @property
    def longest(self) -> int:
        """The maximum number of tokens, prompt and output, of one sequence."""
        return self._ready.capacity

    @property
    def longest_text(self) -> int:
        """The maximum number of tokens of a text that is pooled."""
        return min(self.longest, self._ready.pooling.max_embed_len or self.longest)

    def adds(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        bad_words: Sequence[Sequence[int]] = (),
        truncation_side: Literal["left", "right"] = "left",
        grammar: str = "",
        thinking: ThinkingBudget | None = None,
        deadline: float | None = None,
        tenant: str = "",
        adapter: Adapter | None = None,
        media: Sequence[MediaSpan] = (),
        retain_s: float = 0.0,
        source: Medium | None = None,
        transcript: TranscriptRules | None = None,
    ) -> list[Add]:
        """One Add for each of the `params.n` sequences of a prompt. Only the first is sent: it carries the others as
        its forks. Other arguments are fields of Add.

        Args:
            tokens: The prompt, of which `params.truncate_prompt_tokens` may keep one end only.
            bad_words: `params.bad_words` as tokens.
            truncation_side: The end of a prompt that is cut off.
            grammar: The grammar of `params.structured_outputs`, from a GrammarChecker.

        Raises:
            RequestError: The prompt is empty, a token id is not in the vocabulary, no token could be drawn, too many
                logprobs are asked for, or a priority or arguments that would be ignored.
            ContextLengthError: Prompt and output do not fit; the message has the numbers.
        """
        self.check_generates()
        if self._ready.hears and source is None:
            raise RequestError(_ONLY_HEARS, param="model")
        if media and params.truncate_prompt_tokens is not None:
            raise RequestError(
                "truncate_prompt_tokens cannot be combined with media: leave one of them out.",
                param="truncate_prompt_tokens",
            )
        tokens = self._truncated(tokens, params, truncation_side)
        self._check_tokens(tokens, params, self.longest)
        if params.extra_args and not self._takes_extra_args:
            raise RequestError(
                "extra_args (vllm_xargs) needs a server with --logits-processors: nothing here reads them.",
                param="extra_args",
            )
        self._check_priority(priority)
        assert bool(grammar) == (params.structured_outputs is not None), "a constraint travels as its grammar"
        if grammar:
            params = msgspec.structs.replace(params, structured_outputs=None)
        params = self._resolve_logprobs(self._resolve_length(len(tokens), params))
        stop_ids = [*(() if params.ignore_eos else self._eos_ids), *(params.stop_token_ids or ())]
        forbidden = [list(word) for word in bad_words if self._are_drawn(word)]
        _check_allowed(params, stop_ids, forbidden)
        seed = self._new_seed() if params.seed is None else params.seed
        arrival = self._clock.now()
        first, *others = (next(self._ids) for _ in range(params.n))
        return Add(
            id=first,
            tokens=list(tokens),
            prompt_len=len(tokens),
            sampling=params,
            stop_ids=stop_ids,
            seed=choice_seed(seed, 0),
            arrival=arrival,
            priority=priority,
            cache_salt=cache_salt,
            forks=[Fork(number, choice_seed(seed, index)) for index, number in enumerate(others, 1)],
            bad_words=forbidden,
            grammar=grammar,
            thinking=self._seen(thinking),
            deadline=deadline,
            tenant=tenant,
            adapter=adapter,
            media=list(media),
            retain_s=retain_s,
            source=source,
            transcript=transcript,
        ).sequences()

    def pooled(
        self,
        tokens: Sequence[int],
        params: PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        truncate_prompt_tokens: int | None = None,
        truncation_side: Literal["left", "right"] = "right",
        token_types: bytes | Sequence[int] = b"",
        prompt_skip: int = 0,
        deadline: float | None = None,
        tenant: str = "",
        adapter: Adapter | None = None,
    ) -> list[Add]:
        """The one Add of a text that is pooled. Other arguments are fields of Add.

        Args:
            truncate_prompt_tokens: Use only so many tokens of the text; -1 for as many as fit; None for all.
            truncation_side: The end of a text that is cut off.
            token_types: The type of each token, 0 or 1; empty: all are 0.

        Raises:
            RequestError: The text is empty, a token id is not in the vocabulary, the model does not do the task or make
                vectors of this length, or a priority would be ignored.
            ContextLengthError: The text does not fit; the message has the numbers.
        """
        params = resolve_pooling(params, self._ready.pooling)
        kept, keep = slice(None), truncate_prompt_tokens
        if keep is not None:
            if keep != -1:
                integer("truncate_prompt_tokens", keep, 1)
            _check_kept(keep, self.longest_text)
            keep = self.longest_text if keep < 0 else keep
            kept = slice(keep) if truncation_side == "right" else slice(-keep, None)
        tokens, token_types = tokens[kept], bytes(token_types[kept])
        self._check_tokens(tokens, NO_SAMPLING, self.longest_text)
        self._check_priority(priority)
        if token_types and len(token_types) != len(tokens):
            raise RequestError(f"{len(tokens)} tokens have {len(token_types)} token types.", param="token_type_ids")
        if prompt_skip >= len(tokens):
            raise RequestError("The text behind the model's prompt is empty: send at least one token.", param="input")
        return [
            Add(
                id=next(self._ids),
                tokens=list(tokens),
                prompt_len=len(tokens),
                sampling=NO_SAMPLING,
                stop_ids=[],
                seed=0,
                arrival=self._clock.now(),
                priority=priority,
                cache_salt=cache_salt,
                deadline=deadline,
                tenant=tenant,
                adapter=adapter,
                pooling=params,
                token_types=token_types if any(token_types) else b"",
                prompt_skip=prompt_skip,
            )
        ]

    def _are_drawn(self, tokens: Sequence[int]) -> bool:
        """Whether an output can have these tokens: a tokenizer may know more tokens than the model."""
        return max(tokens, default=0) < self._ready.vocab_size

    def _seen(self, thinking: ThinkingBudget | None) -> ThinkingBudget | None:
        """A limit on reasoning as far as the model has tokens for it; None if it does not reason."""
        if thinking is None or not self._are_drawn(thinking.start):
            return None
        ends = [end for end in thinking.ends if self._are_drawn(end)]
        return msgspec.structs.replace(thinking, ends=ends) if ends else None

    def _check_priority(self, priority: int) -> None:
        if priority and self._policy != "priority":
            raise RequestError(
                "priority needs a server with --scheduling-policy priority; this one serves in the order of arrival.",
                param="priority",
            )

    def _check_tokens(self, tokens: Sequence[int], params: SamplingParams, longest: int) -> None:
        if not tokens:
            raise RequestError("The prompt is empty: send at least one token.", param="prompt")
        if len(tokens) > longest:
            raise ContextLengthError(len(tokens), longest)
        vocab = self._ready.vocab_size
        if not 0 <= min(tokens) <= max(tokens) < vocab:
            wrong = next(token for token in tokens if not 0 <= token < vocab)
            raise RequestError(f"Token id {wrong} is outside the vocabulary of {vocab} tokens.", param="prompt")
        for name, ids in params.named_token_ids():
            if max(ids) >= vocab:
                wrong = next(token for token in ids if token >= vocab)
                raise RequestError(f"{name}: {wrong} is outside the vocabulary of {vocab} tokens.", param=name)
            if len(ids) > vocab:
                raise RequestError(f"{name} names {len(ids)} tokens of {vocab}: name each once.", param=name)

    def _truncated(self, tokens: Sequence[int], params: SamplingParams, side: str) -> Sequence[int]:
        keep = params.truncate_prompt_tokens
        if keep is None:
            return tokens
        _check_kept(keep, self.longest)
        if keep < 0:
            keep = max(1, self.longest - (params.max_tokens or 1))
        return tokens[:keep] if side == "right" else tokens[-keep:]

    def _resolve_logprobs(self, params: SamplingParams) -> SamplingParams:
        """Replace -1 by the size of the vocabulary."""
        vocab = self._ready.vocab_size
        most = vocab if self._max_logprobs < 0 else self._max_logprobs
        changes = {}
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked == WHOLE_VOCABULARY:
                asked = changes[name] = vocab
            if name == "logprobs" and params.logprob_token_ids is not None:
                continue  # as many as are named, which has a limit of its own
            if asked is not None and asked > most:
                raise RequestError(
                    f"{name} must be at most {most} on this server, got {getattr(params, name)}.", param=name
                )
        return msgspec.structs.replace(params, **changes) if changes else params

    def _resolve_length(self, prompt_len: int, params: SamplingParams) -> SamplingParams:
        room = self.longest - prompt_len
        if room < 1:
            raise ContextLengthError(prompt_len, self.longest)
        if params.max_tokens is None:
            if params.min_tokens > room:
                raise ContextLengthError(prompt_len, self.longest, asked=params.min_tokens, param="min_tokens")
            return msgspec.structs.replace(params, max_tokens=room)
        if params.max_tokens > room:
            raise ContextLengthError(prompt_len, self.longest, asked=params.max_tokens, param="max_tokens")
        return params


def _check_kept(keep: int, longest: int) -> None:
    if keep > longest:
        raise RequestError(
            f"truncate_prompt_tokens must be at most {longest}, as many as a sequence here holds, got {keep}.",
            param="truncate_prompt_tokens",
        )


def _check_allowed(params: SamplingParams, stop_ids: Sequence[int], bad_words: Sequence[Sequence[int]]) -> None:
    """Check that at least one allowed token can be drawn at first; what follows depends on the output."""
    if params.allowed_token_ids is None:
        return
    forbidden = {word[0] for word in bad_words if len(word) == 1}
    if params.min_tokens:
        forbidden.update(stop_ids)
    if all(token in forbidden for token in params.allowed_token_ids):
        raise RequestError(
            "allowed_token_ids leaves no token to draw: bad_words forbid them, and min_tokens those that stop.",
            param="allowed_token_ids",
        )
