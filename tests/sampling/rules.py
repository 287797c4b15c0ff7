"""The sampling rules once more, one sequence at a time and in plain Python: the worker must agree with them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quire.sampling_params import SamplingParams

NEVER = float("-inf")


def ruled(
    logits: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    bad_words: Sequence[Sequence[int]] = (),
    stop_ids: Sequence[int] = (),
) -> list[float]:
    """Logits as vLLM's rules leave them, before the temperature."""
    scores = [float(x) for x in logits]
    for token in range(len(scores)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            scores[token] = NEVER
    for word in bad_words:
        prefix = list(word[:-1])
        if len(prefix) <= len(output) and list(output[len(output) - len(prefix) :]) == prefix:
            scores[word[-1]] = NEVER
    if len(output) < params.min_tokens:
        for token in stop_ids:
            scores[token] = NEVER
    for token, value in (params.logit_bias or {}).items():
        scores[token] += value
    for token in set(prompt) | set(output):
        x = scores[token]
        scores[token] = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
    for token in set(output):
        scores[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    return scores


def likeliest(scores: Sequence[float]) -> int:
    """The first of the highest."""
    return max(range(len(scores)), key=lambda token: (scores[token], -token))


def margin(scores: Sequence[float]) -> float:
    """By how much the highest is ahead."""
    first, second = sorted((x for x in scores if not math.isnan(x)), reverse=True)[:2]
    return first - second if second > NEVER else math.inf
