"""Speculative decoding: which method proposes draft tokens, and how many."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, get_args

from quire.errors import ConfigError, did_you_mean

Method = Literal["ngram", "suffix", "draft_model", "eagle3", "mtp"]
MAX_DRAFTS = 16
"""Maximum draft tokens of a step and sequence: longer rows are seldom accepted to their end."""
_NGRAM_KEYS = ("prompt_lookup_max", "prompt_lookup_min")
_SUFFIX_KEYS = ("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests",
                "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob")  # fmt: skip
_SYNTHETIC_KEYS = ("synthetic_acceptance_rates", "synthetic_acceptance_length")
_KEYS = ("method", "model", "num_speculative_tokens", *_NGRAM_KEYS, *_SUFFIX_KEYS, "draft_tensor_parallel_size",
         "rejection_sample_method", *_SYNTHETIC_KEYS)  # fmt: skip
_KEYS_OF: dict[Method, tuple[str, ...]] = {"ngram": _NGRAM_KEYS, "suffix": _SUFFIX_KEYS}
_LATER = ("eagle", "medusa", "mlp_speculator", "ngram_gpu", "dflash")
_MTP = tuple(
    f"{family}_mtp"
    for family in ("deepseek", "glm4_moe", "glm4_moe_lite", "mimo", "qwen3_next", "qwen3_5", "qwen3_5_moe", "ernie")
)
"""Names in vLLM's settings of `mtp`, by the family of the model."""
_NGRAM_MODELS = ("ngram", "[ngram]")
"""Names in vLLM's older settings of prompt lookup, in place of a model."""
_FLAG = "--speculative-config"


@dataclass(frozen=True)
class SuffixOptions:
    """Limits of the method `suffix`.

    Attributes:
        depth: Maximum tokens of a match and its continuation together.
        cached_requests: How many outputs are remembered; with 0 a text is searched in itself alone.
        factor: Maximum tokens that are proposed for each token of the match.
        least_probability: A continuation ends before its probability, by how often it followed, falls below this.
    """

    depth: int = 24
    cached_requests: int = 10_000
    factor: float = 1.0
    least_probability: float = 0.1


@dataclass(frozen=True)
class Speculation:
    """What proposes draft tokens.

    Attributes:
        method: `ngram`: what followed the same tokens earlier in the sequence. `suffix`: what followed them most often
            there and in earlier outputs. `draft_model`: a smaller model. `eagle3`: a head of the model itself. `mtp`:
            the head that the model's own checkpoint has.
        tokens: Maximum draft tokens of a step and sequence.
        model: For `draft_model` and `eagle3`: a directory, a hub id, or `quill_draft` or `quill_eagle3`, which are
            part of the package. For `mtp`: the directory of the model, once settings are resolved. Otherwise empty.
        lookup_max, lookup_min: For `ngram`: the longest and the shortest run of last tokens that is searched.
        suffix: For `suffix`.
        synthetic_rates: For benchmarks only: by position, how likely the draft there and all before it are accepted,
            whatever the model says, so outputs are wrong. Empty: the model decides.
    """

    method: Method
    tokens: int
    model: str = ""
    lookup_max: int = 0
    lookup_min: int = 0
    suffix: SuffixOptions = SuffixOptions()
    synthetic_rates: tuple[float, ...] = ()


@dataclass(frozen=True)
class SpeculationConfig:
    """Several tokens a step: some are guessed, and the model checks them all at once. Outputs stay what they are."""

    speculative_config: dict[str, Any] | None = None
    """Who guesses, as JSON: {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4,
    "prompt_lookup_min": 2}, {"method": "suffix"}, {"model": DRAFT, "num_speculative_tokens": 5} with a smaller
    model of the same tokenizer, {"method": "eagle3", "model": HEAD, "num_speculative_tokens": 4} with an EAGLE-3
    head of the model, or {"method": "mtp"} with the head in the model's own checkpoint. Default: nobody."""
    speculative_model: str | None = None
    """The smaller model that guesses; the same as "model" in --speculative-config. `[ngram]`: the text itself."""
    num_speculative_tokens: int | None = None
    """Most tokens that are guessed for a sequence and step; the same as in --speculative-config."""

    @property
    def speculation(self) -> Speculation | None:
        """What proposes draft tokens; None if nothing does. Raises ConfigError for a value that is not supported."""
        asked = dict(self.speculative_config or {})
        for key, value in (
            ("model", self.speculative_model),
            ("num_speculative_tokens", self.num_speculative_tokens),
        ):
            if value is not None and asked.setdefault(key, value) != value:
                raise _error(f"{_FLAG} says {asked[key]!r} for {key}, and its own flag says {value!r}: give one.")
        given = {key: value for key, value in asked.items() if value is not None}
        if not given and self.speculative_config is None:
            return None
        speculation = _parsed(given)
        return replace(speculation, synthetic_rates=_synthetic_rates(given, speculation.tokens))

    def check_device(self, device: str, ranks: int, stages: int = 1) -> None:
        """Raise ConfigError for what is not supported yet on this device (`cpu` or `cuda`), with this many ranks that
        divide each layer, and this many stages that divide the layers."""
        speculation = self.speculation
        if speculation is None:
            return
        if device != "cpu" and ranks * stages > 1:
            raise _error(f"{_FLAG} is not supported on several GPUs yet: leave it out, or give one GPU.")
        if device != "cpu" and speculation.method == "mtp":
            raise _error(f'{_FLAG}: "method": "mtp" runs on a CPU alone so far: give --device cpu, or another method.')
        if stages > 1:
            raise _error(f"{_FLAG} is not supported with --pipeline-parallel-size {stages} yet: leave one of them out.")


def _parsed(asked: Mapping[str, Any]) -> Speculation:
    for key in asked:
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS) or f" What can be said: {', '.join(_KEYS)}."
            raise _error(f"{_FLAG}: {key!r} is not supported.{hint}")
    if asked.get("draft_tensor_parallel_size", 1) != 1:
        raise _error(f"{_FLAG}: draft_tensor_parallel_size must be 1: ranks divide a draft model like the model.")
    method, model = _method(asked), asked.get("model", "")
    for other, keys in _KEYS_OF.items():
        for key in keys:
            if key in asked and method != other:
                raise _error(f'{_FLAG}: {key} belongs to "method": "{other}".')
    if method in _KEYS_OF and model not in ("", *_NGRAM_MODELS):
        raise _error(f'{_FLAG}: "method": "{method}" takes no "model", got {model!r}.')
    if method == "suffix":
        return _suffix(asked)
    tokens = _number(asked, "num_speculative_tokens", MAX_DRAFTS, 1 if method == "mtp" else None)
    if method == "ngram":
        given = next((key for key in _NGRAM_KEYS if key in asked), None)
        both = 5 if given is None else _number(asked, given, None)
        longest, shortest = (_number(asked, key, None, both) for key in _NGRAM_KEYS)
        if shortest > longest:
            raise _error(f"{_FLAG}: prompt_lookup_min {shortest} is more than prompt_lookup_max {longest}.")
        return Speculation("ngram", tokens, "", longest, shortest)
    if not isinstance(model, str) or not (model or method == "mtp"):
        raise _error(f'{_FLAG}: "method": "{method}" needs a "model".')
    return Speculation(method, tokens, model)


def _suffix(asked: Mapping[str, Any]) -> Speculation:
    usual, (depth_key, cached_key, factor_key, probability_key) = SuffixOptions(), _SUFFIX_KEYS
    depth = _number(asked, depth_key, None, usual.depth, least=2)
    tokens = _number(asked, "num_speculative_tokens", MAX_DRAFTS, min(MAX_DRAFTS, depth))
    cached = _number(asked, cached_key, None, usual.cached_requests, least=0)
    factor, probability = asked.get(factor_key, usual.factor), asked.get(probability_key, usual.least_probability)
    if not _is_real(factor) or not 0 < factor < math.inf:
        raise _error(f"{_FLAG}: {factor_key} must be a number above 0, got {factor!r}.")
    if not _is_real(probability) or not 0 <= probability <= 1:
        raise _error(f"{_FLAG}: {probability_key} must be a number from 0 to 1, got {probability!r}.")
    return Speculation("suffix", tokens, suffix=SuffixOptions(depth, cached, float(factor), float(probability)))


def _synthetic_rates(asked: Mapping[str, Any], tokens: int) -> tuple[float, ...]:
    """Rates as vLLM reads these keys. For a length, drafts are always accepted up to one that sometimes is."""
    how, (rates_key, length_key) = asked.get("rejection_sample_method", "standard"), _SYNTHETIC_KEYS
    rates: Any = asked.get(rates_key)
    length: Any = asked.get(length_key)
    if how not in ("standard", "synthetic"):
        raise _error(f"{_FLAG}: rejection_sample_method must be 'standard' or 'synthetic', got {how!r}.")
    if how == "standard":
        for key in _SYNTHETIC_KEYS:
            if key in asked:
                raise _error(f'{_FLAG}: {key} belongs to "rejection_sample_method": "synthetic".')
        return ()
    if (rates is None) == (length is None):
        raise _error(f"{_FLAG}: give either {rates_key} or {length_key} with the synthetic rejection_sample_method.")
    if rates is None:
        if not _is_real(length) or not 1 <= length <= tokens + 1:
            raise _error(f"{_FLAG}: {length_key} must be a number from 1 to {tokens + 1}, got {length!r}.")
        return tuple(min(1.0, max(0.0, length - 1 - place)) for place in range(tokens))
    if not isinstance(rates, list) or len(rates) != tokens or not all(map(_is_real, rates)):
        raise _error(f"{_FLAG}: {rates_key} must be a list of {tokens} numbers, one a draft, got {rates!r}.")
    if not all(before >= after for before, after in pairwise([1.0, *rates, 0.0])):
        raise _error(f"{_FLAG}: {rates_key} must lie between 0 and 1 and not rise, got {rates!r}.")
    return tuple(map(float, rates))


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _method(asked: Mapping[str, Any]) -> Method:
    named, model = asked.get("method"), asked.get("model")
    if named is None:
        named = "ngram" if model in _NGRAM_MODELS else "draft_model" if model else None
    if named in _MTP:
        return "mtp"
    for method in get_args(Method):
        if named == method:
            return method  # type: ignore[no-any-return]
    known = " or ".join(get_args(Method))
    if named is None:
        raise _error(f'{_FLAG}: give a "method" ({known}) or a "model".')
    if named in _LATER:
        raise _error(f"{_FLAG}: the method {named!r} comes in a later version; give {known}.")
    raise _error(f"{_FLAG}: {named!r} is no method; give {known}.")


def _number(asked: Mapping[str, Any], key: str, most: int | None, default: Any = None, least: int = 1) -> int:
    value = asked.get(key, default)
    if value is None:
        raise _error(f"{_FLAG}: {key} is missing.")
    if type(value) is not int or value < least or (most is not None and value > most):
        limits = f"a whole number, at least {least}" if most is None else f"a whole number from {least} to {most}"
        raise _error(f"{_FLAG}: {key} must be {limits}, got {value!r}.")
    return value


def _error(text: str) -> ConfigError:
    return ConfigError(text, param="speculative_config")
