"""Logits processors for the tests, by import path as an operator names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.errors import RequestError
from quire.logits_processors import RequestProcessor
from quire.sampling_params import SamplingParams


class CountUp:
    """With `{"count_up": k}`: the only token is the one `k` above the last; needs every token before it is drawn."""

    def for_request(self, sampling: SamplingParams) -> RequestProcessor | None:
        step = (sampling.extra_args or {}).get("count_up")
        if step is None:
            return None
        if not isinstance(step, int):
            raise RequestError("count_up must be an integer.", param="extra_args")

        def process(prompt: Sequence[int], output: Sequence[int], logits: Any) -> Any:
            token = ([*prompt, *output][-1] + step) % len(logits)
            kept = logits[token].item()
            logits.fill_(-float("inf"))
            logits[token] = kept
            return logits

        return process


class Breaks:
    """With `{"break_at": n}`: raises at output token n."""

    def for_request(self, sampling: SamplingParams) -> RequestProcessor | None:
        at = (sampling.extra_args or {}).get("break_at")

        def process(prompt: Sequence[int], output: Sequence[int], logits: Any) -> Any:
            if len(output) == at:
                raise ValueError("broken")
            return logits if len(output) < at else logits[:3]

        return None if at is None else process


class Spoils:
    """With `{"spoil": value}`: that is every token's logit."""

    def for_request(self, sampling: SamplingParams) -> RequestProcessor | None:
        value = (sampling.extra_args or {}).get("spoil")

        def process(prompt: Sequence[int], output: Sequence[int], logits: Any) -> Any:
            return logits.fill_(float(value))

        return None if value is None else process


class NoProcessor:
    """Has no `for_request`."""
