"""Has each new constraint of a request translated and tried in a helper process, and remembers what passed.

For the API process and `LLM`. Never imports the compiler.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from quire.engine.structured_output.messages import Constraint, Verdict, constraint_of
from quire.errors import UnavailableError
from quire.foundation.processes.helper_process import HelperPool, HelperProcess
from quire.structured_outputs_params import StructuredOutputsParams

logger = logging.getLogger(__name__)

MAX_HELPERS = 4
"""How many constraints are tried at once. One that explodes holds a helper until its time is over."""
CHECK_SECONDS = 1.6
"""After this time a new constraint is given up, and its request is refused."""
_MODULE = "quire.engine.structured_output.checker_process"
_REMEMBERED_BYTES = 32 * 2**20
_START_SECONDS = 20.0
"""How long a helper may take to start, in seconds. On an idle machine it takes a tenth of a second."""
_TOO_COMPLEX = (
    f"it could not be compiled within {CHECK_SECONDS:g} s and the memory for it: make it smaller, or lower the "
    "numbers of repetitions in it"
)


class GrammarChecker:
    """Translates constraints to grammars. Any thread may ask; each waits for its own answer."""

    def __init__(self, special_tokens: Mapping[str, int] | None = None) -> None:
        arguments = ("--special-tokens", msgspec.json.encode(special_tokens or {}).decode())
        self._helpers = HelperPool[Constraint, Verdict](
            lambda: HelperProcess(_MODULE, Verdict, arguments=arguments), _START_SECONDS, "The grammar compiler"
        )
        self._verdicts: OrderedDict[Constraint, Verdict] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(MAX_HELPERS)

    def known(self, params: StructuredOutputsParams, behind: str = "") -> str | None:
        """The grammar of a constraint that was asked for before, without waiting; None for a new one. Raises
        RequestError if the constraint was refused then."""
        verdict = self._remembered(constraint_of(params, behind))
        return None if verdict is None else _grammar(verdict, params)

    def grammar(self, params: StructuredOutputsParams, behind: str = "") -> str:
        """The grammar of a constraint; takes CHECK_SECONDS at most, and usually milliseconds.

        Args:
            behind: What may come before the constrained output, see `reasoning_in_front`.

        Raises:
            RequestError: The constraint cannot be honoured in full, is malformed, or is too complex.
            UnavailableError: No helper was free for a long time, or none starts.
        """
        constraint = constraint_of(params, behind)
        verdict = self._remembered(constraint)
        if verdict is None:
            verdict = self._ask(constraint)
            if verdict.left_out:
                logger.warning(
                    "%s: a schema that is not strict is enforced but for %s. With 'strict' it is refused.",
                    params.name, ", ".join(verdict.left_out),
                )  # fmt: skip
        return _grammar(verdict, params)

    def close(self) -> None:
        """End the helpers."""
        self._helpers.close()

    def _ask(self, constraint: Constraint) -> Verdict:
        if not self._free.acquire(timeout=_START_SECONDS):
            raise UnavailableError("Too many new grammars are being compiled. Send the request again.")
        try:
            verdict = self._helpers.ask(constraint, CHECK_SECONDS)
        finally:
            self._free.release()
        if verdict is None:
            return Verdict(error=_TOO_COMPLEX)
        self._remember(constraint, verdict)
        return verdict

    def _remembered(self, constraint: Constraint) -> Verdict | None:
        with self._lock:
            verdict = self._verdicts.get(constraint)
            if verdict is not None:
                self._verdicts.move_to_end(constraint)
            return verdict

    def _remember(self, constraint: Constraint, verdict: Verdict) -> None:
        with self._lock:
            if constraint not in self._verdicts:
                self._verdicts[constraint] = verdict
                self._bytes += _size(constraint, verdict)
            while self._bytes > _REMEMBERED_BYTES:
                self._bytes -= _size(*self._verdicts.popitem(last=False))


def _grammar(verdict: Verdict, params: StructuredOutputsParams) -> str:
    if verdict.error:
        raise params.error(f"{verdict.error}.")
    return verdict.grammar


def _size(constraint: Constraint, verdict: Verdict) -> int:
    texts = (constraint.text, constraint.behind, verdict.grammar, verdict.error, *verdict.left_out)
    return sum(map(len, texts))
