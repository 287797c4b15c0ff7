"""What each key may send: requests a minute, and how many at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import OverloadedError
from quire.foundation.clock import Clock
from quire.serving.router.backend_list import KeyLimits

_MINUTE_S = 60.0


@dataclass
class _Use:
    """Requests that a key may send now, as of `at`, and those that are open."""

    left: float
    at: float
    open: int = 0


class RateLimiter:
    """A token bucket for each key, which holds the requests of a minute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._uses: dict[bytes, _Use] = {}

    def keep(self, keys: Sequence[KeyLimits]) -> None:
        """Let only these keys be valid now. What was counted for them stays."""
        known = {key.digest for key in keys}
        self._uses = {digest: use for digest, use in self._uses.items() if digest in known}

    def begin(self, key: KeyLimits) -> int | None:
        """Count a request, which has to `end`. Returns how many may follow at once; None for any number. Raises
        OverloadedError, whose `param` names the limit, if the key may send no request now."""
        now = self._clock.now()
        per_minute = key.requests_per_minute
        use = self._uses.setdefault(key.digest, _Use(per_minute or 0, now))
        if key.max_concurrent_requests is not None and use.open >= key.max_concurrent_requests:
            raise _over("max_concurrent_requests", f"{use.open} requests of this key are open, its most", 1)
        left = None
        if per_minute is not None:
            use.left = min(per_minute, use.left + (now - use.at) * per_minute / _MINUTE_S)
            use.at = now
            if use.left < 1:
                wait = math.ceil((1 - use.left) * _MINUTE_S / per_minute)
                raise _over("requests_per_minute", f"This key has sent its {per_minute} requests a minute", wait)
            use.left -= 1
            left = int(use.left)
        use.open += 1
        return left

    def end(self, key: KeyLimits) -> None:
        if (use := self._uses.get(key.digest)) is not None:
            use.open = max(0, use.open - 1)  # the key may have been out of the list meanwhile


def _over(limit: str, what: str, wait_s: int) -> OverloadedError:
    error = OverloadedError(f"{what}. Send it again in {wait_s} s.", retry_after_s=wait_s)
    error.param = limit
    return error
