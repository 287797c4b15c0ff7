"""Bitmasks of sequences with a grammar, from the texts of grammars on.

- `checker.py`, `checker_process.py`: what a request asks for is translated and tried before the engine hears of it.
  `grammars.py` translates, with `json_schema.py`, `ebnf.py`, `structural_tag.py` and what these import.
- `mask_maker.py` compiles a grammar for the model's tokens, with `grammar_compiler.py`, follows sequences, each with a
  `matcher.py`, and fills their bitmasks. `mask_process.py` has that done in another process.

An engine on a CPU makes masks in its own process: kernels keep all cores busy, so a message to another process costs a
step a third of its time. Beside a GPU they are made in another process, while the engine plans; so are those of large
vocabularies, whose loading would hold up the engine for half a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quire.engine.structured_output.mask_maker import MaskMaker
from quire.engine.structured_output.mask_process import MaskProcess
from quire.engine.structured_output.messages import Failure, Filled, Prepare, Prepared, Row, first_masks
from quire.errors import GenerationError, QuireError, RequestError
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import Add
from quire.foundation.messages.workers import Bits
from quire.planning.step_limits import StepLimits
from quire.scheduling.scheduler.request import Request

MAX_OWN_VOCAB = 2**15
"""Largest vocabulary whose masks are filled in the engine's process: the time grows with it."""


def grammar_masks(config: Config, vocab_size: int) -> GrammarMasks | None:
    """The masks for a model under resolved settings; None where work is on token ids only."""
    model = config.model
    if model.skip_tokenizer_init:
        return None
    beside = config.device.device == "cuda" or vocab_size > MAX_OWN_VOCAB
    tokenizer = model.tokenizer or model.model
    return GrammarMasks(model.model, tokenizer, vocab_size, StepLimits.of(config).sampled, beside=beside)


class GrammarMasks:
    """The TokenBitmaskSource of grammars; `beside` says that another process makes the masks."""

    def __init__(self, model: str, tokenizer: str, vocab_size: int, max_masks: int, *, beside: bool) -> None:
        self._prepared: list[Prepared] = []
        self._maker: MaskMaker | MaskProcess
        if beside:
            self._maker = MaskProcess(model, tokenizer, vocab_size, max_masks, self._prepared.append)
        else:
            masks = np.zeros((max_masks, 4 * -(-vocab_size // 32)), dtype=np.uint8)
            self._maker = MaskMaker(model, tokenizer, masks, vocab_size, 1, self._prepared.append)
        self._max_masks = max_masks
        self._sent: dict[int, int] = {}  # by sequence: how many of its tokens the maker knows
        self._rows: list[Row] = []  # that were asked for last
        self._filled = Filled([])  # their masks, if these are there already

    def wants(self, message: Add) -> bool:
        return bool(message.grammar)

    def prepare(self, message: Add) -> bool:
        self._sent[message.id] = message.prompt_len
        sampling = message.sampling
        stop_ids = message.stop_ids if sampling.min_tokens else []
        prepare = Prepare(message.id, message.grammar, sampling.ignore_eos, stop_ids, sampling.min_tokens)
        return self._maker.prepare(prepare)

    def prepared(self) -> list[tuple[int, QuireError | None]]:
        if isinstance(self._maker, MaskProcess):
            self._maker.poll()
        ready = []
        while self._prepared:
            each = self._prepared.pop(0)
            if each.id in self._sent:  # else it was aborted
                ready.append((each.id, None if each.failure is None else _error(each.failure)))
        return ready

    def ask(self, requests: Sequence[Request], drafts: Mapping[int, Sequence[int]]) -> bool:
        rows = []
        for request in requests:
            tokens = request.tokens[self._sent.get(request.id, 0) :]
            rows.append(Row(request.id, tokens, list(drafts.get(request.id, ()))))
            self._sent[request.id] = len(request.tokens)
        assert sum(1 + len(row.drafts) for row in rows) <= self._max_masks
        self._rows = rows
        if isinstance(self._maker, MaskProcess):
            self._maker.ask(rows)
            return False
        self._filled = self._maker.fill(rows)
        return True

    def bits(self) -> list[Sequence[Bits] | QuireError | None]:
        filled = self._maker.filled() if isinstance(self._maker, MaskProcess) else self._filled
        masks = self._maker.masks
        answers: list[Sequence[Bits] | QuireError | None] = []
        for number, (first, count) in enumerate(zip(first_masks(self._rows), filled.counts, strict=True)):
            if (failure := filled.failures.get(number)) is not None:
                answers.append(_error(failure))
            else:
                answers.append([memoryview(masks[place]) for place in range(first, first + count)] or None)
        return answers

    def forget(self, request_id: int) -> None:
        if self._sent.pop(request_id, None) is not None:
            self._maker.forget(request_id)

    def close(self) -> None:
        if isinstance(self._maker, MaskProcess):
            self._maker.close()


def _error(failure: Failure) -> QuireError:
    return RequestError(failure.message) if failure.refused else GenerationError(failure.message)
