"""A logits processor, as a user may write one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.logits_processors import RequestProcessor
from quire.sampling_params import SamplingParams


class NotTheLast:
    """Forbids the last so many tokens of the output."""

    def for_request(self, sampling: SamplingParams) -> RequestProcessor | None:
        """For requests with `not_the_last`."""
        count = (sampling.extra_args or {}).get("not_the_last")

        def forbid(prompt: Sequence[int], output: Sequence[int], logits: Any) -> Any:
            logits[output[-count:]] = -float("inf")
            return logits

        return forbid if count else None
