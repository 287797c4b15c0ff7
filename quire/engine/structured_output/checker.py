"""Has each new constraint of a request translated and tried in a helper process, and remembers what passed. Finished
values are checked there as well.

For the API process and `LLM`. Never imports the compiler.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from quire.engine.structured_output.messages import Constraint, FinishedValue, Task, Verdict, constraint_of
from quire.errors import UnavailableError
from quire.foundation.processes.helper_process import HelperPool, HelperProcess
from quire.structured_outputs_params import StructuredOutputsParams

logger = logging.getLogger(__name__)

MAX_HELPERS = 4
"""How many constraints are tried at once. One that explodes holds a helper until its time is over."""
MAX_VALUE_HELPERS = 2
"""How many finished values are checked at once, beside constraints: neither keeps the other waiting."""
CHECK_SECONDS = 1.6
"""After this time a new constraint is given up, and its request is refused."""
SLOW_CHECK_SECONDS = 0.2
"""After this time a value is given up if another one took CHECK_SECONDS under its schema."""
_MAX_SLOW = 1_024
_MODULE = "quire.engine.structured_output.checker_process"
_REMEMBERED_BYTES = 32 * 2**20
_START_SECONDS = 20.0
"""How long a helper may take to start, in seconds. On an idle machine it takes a tenth of a second."""
_TOO_COMPLEX = (
    f"it could not be compiled within {CHECK_SECONDS:g} s and the memory for it: make it smaller, or lower the "
    "numbers of repetitions in it"
)
_TOO_LONG = f"it could not be checked within {CHECK_SECONDS:g} s and the memory for it"


class GrammarChecker:
    """Translates constraints to grammars. Any thread may ask; each waits for its own answer."""

    def __init__(self, special_tokens: Mapping[str, int] | None = None) -> None:
        arguments = ("--special-tokens", msgspec.json.encode(special_tokens or {}).decode())
        self._helpers = HelperPool[Task, Verdict](
            lambda: HelperProcess(_MODULE, Verdict, arguments=arguments), _START_SECONDS, "The grammar compiler"
        )
        self._verdicts: OrderedDict[Constraint, Verdict] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(MAX_HELPERS)
        self._free_for_values = threading.BoundedSemaphore(MAX_VALUE_HELPERS)
        self._slow: OrderedDict[int, None] = OrderedDict()  # hashes of schemas under which a check took too long

    def known(self, params: StructuredOutputsParams, behind: str = "") -> Verdict | None:
        """The verdict on a constraint that was asked for before, without waiting; None for a new one. Raises
        RequestError if the constraint was refused then."""
        verdict = self._remembered(constraint_of(params, behind))
        return None if verdict is None else _passed(verdict, params)

    def check(self, params: StructuredOutputsParams, behind: str = "") -> Verdict:
        """The grammar of a constraint, and the schemas that it does not enforce in full; takes CHECK_SECONDS at most,
        and usually milliseconds.

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
            if left_out := [each for schema in verdict.lenient for each in schema.left_out]:
                logger.warning(
                    "%s: a schema that is not strict is enforced but for %s, which outputs are checked for when they "
                    "are finished. With 'strict' it is refused.", params.name, ", ".join(left_out),
                )  # fmt: skip
        return _passed(verdict, params)

    def problem(self, value: FinishedValue) -> str:
        """What is wrong with a finished value, as part of a sentence; empty if it is valid. Takes CHECK_SECONDS at
        most. Raises UnavailableError if no helper was free for a long time, or none starts."""
        schema = hash(value.schema)
        seconds = SLOW_CHECK_SECONDS if schema in self._slow else CHECK_SECONDS
        verdict = self._answer(value, seconds, self._free_for_values)
        if verdict is not None:
            return verdict.error
        with self._lock:
            self._slow[schema] = None
            while len(self._slow) > _MAX_SLOW:
                self._slow.popitem(last=False)
        return _TOO_LONG

    def close(self) -> None:
        """End the helpers."""
        self._helpers.close()

    def _ask(self, constraint: Constraint) -> Verdict:
        verdict = self._answer(constraint, CHECK_SECONDS, self._free)
        if verdict is None:
            return Verdict(error=_TOO_COMPLEX)
        self._remember(constraint, verdict)
        return verdict

    def _answer(self, task: Task, seconds: float, free: threading.BoundedSemaphore) -> Verdict | None:
        if not free.acquire(timeout=_START_SECONDS):
            raise UnavailableError("Too many new grammars are being compiled. Send the request again.")
        try:
            return self._helpers.ask(task, seconds)
        finally:
            free.release()

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


def _passed(verdict: Verdict, params: StructuredOutputsParams) -> Verdict:
    if verdict.error:
        raise params.error(f"{verdict.error}.")
    return verdict


def _size(constraint: Constraint, verdict: Verdict) -> int:
    lenient = (text for each in verdict.lenient for text in (each.schema, each.tool, *each.left_out))
    texts = (constraint.text, constraint.behind, verdict.grammar, verdict.error, *lenient)
    return sum(map(len, texts))
