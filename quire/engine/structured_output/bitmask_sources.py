"""Which process follows a sequence with a grammar: the engine's own one, or one beside it.

Owns that choice, and moving a sequence whose grammar has become too much for the engine's process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.engine.structured_output.bitmask_source import GrammarBitmasks, prepare_of
from quire.engine.structured_output.local_matchers import MOST_TOKENS, LocalMatchers
from quire.engine.structured_output.matcher_messages import Filled, Row, first_masks
from quire.errors import QuireError
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import Add
from quire.foundation.messages.workers import Bits
from quire.planning.step_limits import StepLimits
from quire.scheduling.scheduler.request import Request

_Answer = Sequence[Bits] | QuireError | None


def grammar_bitmasks(config: Config, vocab_size: int) -> GrammarBitmasks | LocalFirstBitmasks | None:
    """For a model under resolved settings; None where work is on token ids only."""
    model = config.model
    if model.skip_tokenizer_init:
        return None
    given = model.model, model.tokenizer or model.model, vocab_size, StepLimits.of(config).sampled
    beside = GrammarBitmasks(*given)
    if config.device.device == "cuda" or vocab_size > MOST_TOKENS:
        return beside
    return LocalFirstBitmasks(beside, LocalMatchers(*given))


class LocalFirstBitmasks:
    """Follows sequences in the engine's process once their grammars are known to be light, others beside it.

    Args:
        beside: The matcher process, which tries each grammar first.
        local: Matchers in this process.
    """

    def __init__(self, beside: GrammarBitmasks, local: LocalMatchers) -> None:
        self._beside = beside
        self._local = local
        self._sent: dict[int, int] = {}  # by sequence: how many of its tokens its local matcher knows
        self._waiting: dict[int, Add] = {}  # sequences that do not run yet
        self._here: list[Request] = []
        self._there: list[Request] = []
        self._asked: list[int] = []
        self._drafts: Mapping[int, Sequence[int]] = {}
        self._rows: list[Row] = []  # of those that are followed here
        self._filled = Filled([])

    def wants(self, message: Add) -> bool:
        return bool(message.grammar)

    def prepare(self, message: Add) -> bool:
        if self._follow_here(message):
            return True
        self._waiting[message.id] = message
        return self._beside.prepare(message)

    def prepared(self) -> list[tuple[int, QuireError | None]]:
        if not self._waiting:
            return []
        ready: list[tuple[int, QuireError | None]] = []
        for sequence, error in self._beside.prepared():
            if error is None and self._beside.is_light(sequence):
                self._local.compile(prepare_of(self._waiting[sequence]))
            elif self._waiting.pop(sequence, None) is not None:
                ready.append((sequence, error))
        for compiled in self._local.compiled():
            message = self._waiting.pop(compiled.id, None)
            if message is not None:  # else it was aborted
                if self._follow_here(message):
                    self._beside.forget(message.id)
                ready.append((message.id, None))
        return ready

    def ask(self, requests: Sequence[Request], drafts: Mapping[int, Sequence[int]]) -> bool:
        self._asked, self._drafts = [request.id for request in requests], drafts
        self._here = [request for request in requests if self._local.follows(request.id)]
        self._there = [request for request in requests if not self._local.follows(request.id)]
        if self._there:
            self._beside.ask(self._there, drafts)  # it works meanwhile
        rows = []
        for request in self._here:
            tokens = request.tokens[self._sent[request.id] :]
            rows.append(Row(request.id, tokens, list(drafts.get(request.id, ()))))
            self._sent[request.id] = len(request.tokens)
        self._rows, self._filled = rows, self._local.fill(rows) if rows else Filled([])
        return not self._there and "failed" not in self._filled.states

    def bits(self) -> list[_Answer]:
        answers: dict[int, _Answer] = {}
        if self._there:
            answers.update(zip((request.id for request in self._there), self._beside.bits(), strict=True))
        failed, states = [], self._filled.states
        counts = self._filled.counts or [1] * len(states)
        for request, state, first, count in zip(self._here, states, first_masks(self._rows), counts, strict=True):
            if state == "failed":
                failed.append(request)
            else:
                masks = self._local.masks[first : first + count]
                answers[request.id] = [memoryview(mask) for mask in masks] if state == "masked" else None
        if failed:
            answers.update(self._go_on_beside(failed, answers))
        return [answers[sequence] for sequence in self._asked]

    def forget(self, request_id: int) -> None:
        self._waiting.pop(request_id, None)
        if self._sent.pop(request_id, None) is not None:
            self._local.forget(request_id)
        self._beside.forget(request_id)

    def close(self) -> None:
        self._beside.close()

    def _follow_here(self, message: Add) -> bool:
        if not self._local.add(prepare_of(message)):
            return False
        self._sent[message.id] = message.prompt_len
        return True

    def _go_on_beside(self, requests: Sequence[Request], others: Mapping[int, _Answer]) -> dict[int, _Answer]:
        """Answers of the matcher process for sequences whose matchers failed here, and then those of `others`, which
        its next fill would overwrite."""
        kept: dict[int, _Answer] = {
            sequence: list(map(bytes, answer)) if isinstance(answer, list) else answer
            for sequence, answer in others.items()
        }
        for request in requests:
            del self._sent[request.id]
            self._local.forget(request.id)
        self._beside.prepare_now([request.add for request in requests])
        self._beside.ask(requests, self._drafts)
        return kept | dict(zip((request.id for request in requests), self._beside.bits(), strict=True))
