"""Which process follows a sequence with a grammar: the engine's own one, or one beside it.

Owns that choice, and moving a sequence whose grammar has become too much for the engine's process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.config import Config
from quire.errors import GenerationError
from quire.messages import Add, Bits
from quire.scheduler.request import Request
from quire.structured_output.bitmask_source import GrammarBitmasks, prepare_of
from quire.structured_output.local_matchers import MOST_TOKENS, LocalMatchers
from quire.structured_output.matcher_messages import Row, RowState

_Answer = Bits | GenerationError | None


def grammar_bitmasks(config: Config, vocab_size: int) -> GrammarBitmasks | LocalFirstBitmasks | None:
    """For a model under resolved settings; None where work is on token ids only."""
    model = config.model
    if model.skip_tokenizer_init:
        return None
    rows = config.scheduler.max_num_seqs
    assert rows, "settings are resolved by quire.planning.auto_config"
    given = model.model, model.tokenizer or model.model, vocab_size, rows
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
        self._states: list[RowState] = []

    def wants(self, message: Add) -> bool:
        return bool(message.grammar)

    def prepare(self, message: Add) -> bool:
        if self._follow_here(message):
            return True
        self._waiting[message.id] = message
        return self._beside.prepare(message)

    def prepared(self) -> list[tuple[int, str]]:
        if not self._waiting:
            return []
        ready = []
        for sequence, error in self._beside.prepared():
            if not error and self._beside.is_light(sequence):
                self._local.compile(prepare_of(self._waiting[sequence]))
            elif self._waiting.pop(sequence, None) is not None:
                ready.append((sequence, error))
        for compiled in self._local.compiled():
            message = self._waiting.pop(compiled.id, None)
            if message is not None:  # else it was aborted
                if self._follow_here(message):
                    self._beside.forget(message.id)
                ready.append((message.id, ""))
        return ready

    def ask(self, requests: Sequence[Request]) -> bool:
        self._asked = [request.id for request in requests]
        self._here = [request for request in requests if self._local.follows(request.id)]
        self._there = [request for request in requests if not self._local.follows(request.id)]
        if self._there:
            self._beside.ask(self._there)  # it works meanwhile
        rows = []
        for request in self._here:
            rows.append(Row(request.id, request.tokens[self._sent[request.id] :]))
            self._sent[request.id] = len(request.tokens)
        self._states = self._local.fill(rows) if rows else []
        return not self._there and "failed" not in self._states

    def bits(self) -> list[_Answer]:
        answers: dict[int, _Answer] = {}
        if self._there:
            answers.update(zip((request.id for request in self._there), self._beside.bits(), strict=True))
        failed = []
        for place, (request, state) in enumerate(zip(self._here, self._states, strict=True)):
            if state == "failed":
                failed.append(request)
            else:
                answers[request.id] = self._bits_of(place, state)
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

    def _bits_of(self, place: int, state: RowState) -> Bits | None:
        return memoryview(self._local.masks[place]) if state == "masked" else None

    def _go_on_beside(self, requests: Sequence[Request], others: Mapping[int, _Answer]) -> dict[int, _Answer]:
        """Answers of the matcher process for sequences whose matchers failed here, and then those of `others`, which
        its next fill would overwrite."""
        kept = {sequence: bytes(bits) if isinstance(bits, memoryview) else bits for sequence, bits in others.items()}
        for request in requests:
            del self._sent[request.id]
            self._local.forget(request.id)
        self._beside.prepare_now([request.add for request in requests])
        self._beside.ask(requests)
        return kept | dict(zip((request.id for request in requests), self._beside.bits(), strict=True))
