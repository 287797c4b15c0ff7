"""Grammars of structured outputs, and finished values, checked beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quire.engine.structured_output.checker import MAX_HELPERS, MAX_VALUE_HELPERS, GrammarChecker
from quire.engine.structured_output.messages import FinishedValue
from quire.sampling_params import SamplingParams


class GrammarChecks:
    """Checks grammars and values in other processes, for which threads wait. Without a tokenizer no constraint can be
    followed."""

    def __init__(self, special_tokens: Mapping[str, int] | None, *, has_tokenizer: bool) -> None:
        self._has_tokenizer = has_tokenizer
        self._checker = GrammarChecker(special_tokens)
        self._threads = ThreadPoolExecutor(MAX_HELPERS, thread_name_prefix="grammar")
        self._value_threads = ThreadPoolExecutor(MAX_VALUE_HELPERS, thread_name_prefix="finished-value")

    async def options(self, params: SamplingParams, behind: str = "") -> dict[str, Any]:
        """The grammar that `EngineSession.add_request` needs for `params.structured_outputs`, if there are any, and the
        schemas that it does not enforce in full. Raises a RequestError that names the field, or UnavailableError if too
        many are being checked.

        `behind` is what may come before the constrained output, see `reasoning_in_front`.
        """
        asked = params.structured_outputs
        if asked is None:
            return {}
        if not self._has_tokenizer:
            raise asked.error("this server has no tokenizer: start it without --skip-tokenizer-init.")
        verdict = self._checker.known(asked, behind)
        if verdict is None:
            loop = asyncio.get_running_loop()
            verdict = await loop.run_in_executor(self._threads, self._checker.check, asked, behind)
        return {"grammar": verdict.grammar, "lenient": verdict.lenient}

    async def problem(self, value: FinishedValue) -> str:
        """What is wrong with a finished value, see `GrammarChecker.problem`."""
        return await asyncio.get_running_loop().run_in_executor(self._value_threads, self._checker.problem, value)

    def close(self) -> None:
        """End the threads and processes that check."""
        for threads in (self._threads, self._value_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self._checker.close()
