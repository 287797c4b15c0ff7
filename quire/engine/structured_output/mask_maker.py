"""Follows sequences by their grammars and fills their bitmasks, in whichever process it is.

Grammars compile in a thread beside the one that fills, so that running sequences do not wait for new ones.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quire.engine.structured_output.matcher import Bitmasks, DraftMatcher, Matcher
from quire.engine.structured_output.messages import Failure, Filled, Prepare, Prepared, Row, first_masks
from quire.foundation.processes.helper_process import STACK_BYTES, ChannelClosed

if TYPE_CHECKING:  # the compiler is imported with the first grammar
    from llguidance import LLExecutor, LLMatcher

    from quire.engine.structured_output.grammar_compiler import GrammarCompiler

logger = logging.getLogger(__name__)

LOST = Failure("The grammar of this output was lost. Send the request again.")
_BROKEN = Failure("The grammar could not be compiled. See the log.")


class MaskMaker:
    """The matchers of one engine's sequences. For one thread.

    Args:
        masks: The bitmasks that are filled.
        threads: How many threads fill.
        report: Takes each Prepared of a grammar that had to be compiled, in the compiling thread.
    """

    def __init__(
        self, model: str, tokenizer: str, masks: Bitmasks, vocab_size: int, threads: int,
        report: Callable[[Prepared], None],
    ) -> None:  # fmt: skip
        self.masks = masks
        self._given = Path(model), Path(tokenizer), vocab_size
        self._num_threads = threads
        self._report = report
        self._matchers: dict[int, Matcher] = {}
        self._compiler: GrammarCompiler | None = None
        self._executor: LLExecutor | None = None
        self._lock = threading.Lock()  # of what follows, and of adding to `_matchers`
        self._waiting: set[int] = set()
        self._to_compile: queue.SimpleQueue[Prepare] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def prepare(self, prepare: Prepare) -> bool:
        """Begin a sequence. Returns whether it can be filled at once: its grammar is known. Else a report follows."""
        with self._lock:
            compiled = None if self._compiler is None else self._compiler.known(prepare.grammar)
            if compiled is not None:
                self._add(prepare, compiled)
                return True
            self._waiting.add(prepare.id)
        self._to_compile.put(prepare)
        if self._thread is None:
            stack_bytes = threading.stack_size(STACK_BYTES)
            self._thread = threading.Thread(target=self._compile, name="grammars", daemon=True)
            self._thread.start()
            threading.stack_size(stack_bytes)
        return False

    def forget(self, sequence: int) -> None:
        """Forget a sequence that is over, or never began."""
        with self._lock:
            self._waiting.discard(sequence)
            self._matchers.pop(sequence, None)

    def fill(self, rows: Sequence[Row]) -> Filled:
        """Fill each row's bitmasks in the places of `first_masks`."""
        matchers, places = [self._matchers.get(row.id) for row in rows], first_masks(rows)
        known = [(matcher, place) for matcher, place in zip(matchers, places, strict=True) if matcher is not None]
        self._consume([(matcher, row) for matcher, row in zip(matchers, rows, strict=True) if matcher is not None])
        self._write([(matcher.compiled, place) for matcher, place in known if matcher.writes])
        for matcher, place in known:
            matcher.clear_forbidden(self.masks[place])
        first = self.masks[places] if any(row.drafts for row in rows) else self.masks[: len(rows)]
        any_allowed = np.any(first.view(np.uint32), axis=1).tolist()
        counts, failures, ahead = [0] * len(rows), {}, {}
        for number, own in enumerate(matchers):
            if own is None:
                failures[number] = LOST
            elif own.goes_on(any_allowed[number]):
                counts[number] = 1
                if rows[number].drafts:
                    ahead[number] = DraftMatcher(own, rows[number].drafts, places[number])
            elif own.failure is not None:
                failures[number] = own.failure
        if ahead:
            self._look_ahead(list(ahead.values()))
            for number, drafts in ahead.items():
                counts[number] = drafts.count
        return Filled(counts, failures)

    def _look_ahead(self, ahead: list[DraftMatcher]) -> None:
        """Fill the masks behind drafts: those behind all first ones at once, and so on."""
        while ahead := [each for each in ahead if each.advance(self.masks)]:
            self._write([(each.compiled, each.place) for each in ahead])
            for each in ahead:
                each.take(self.masks[each.place])

    def _consume(self, rows: Sequence[tuple[Matcher, Row]]) -> None:
        """Take in tokens that are new, by several threads: 10 µs each."""
        single: list[Matcher] = []
        tokens: list[tuple[LLMatcher, int]] = []
        for matcher, row in rows:
            if len(row.tokens) == 1 and self._executor is not None:
                single.append(matcher)
                tokens.append((matcher.compiled, row.tokens[0]))
            else:
                consumed = matcher.compiled.try_consume_tokens(row.tokens) if row.tokens else 0
                matcher.consumed(len(row.tokens), all_of_them=consumed == len(row.tokens))
        if self._executor is not None and tokens:
            for matcher, whole in zip(single, self._executor.consume_token_par(tokens), strict=True):
                matcher.consumed(1, all_of_them=whole)

    def _write(self, matchers: list[tuple[LLMatcher, int]]) -> None:
        """Write all masks at once, by several threads: one after another, 64 take longer than a GPU's step leaves."""
        start, size = self.masks.ctypes.data, self.masks.shape[1]
        if self._executor is None:
            for compiled, place in matchers:
                compiled.unsafe_compute_mask_ptr(start + place * size, size)
        elif matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, start, size, len(self.masks))

    def _add(self, prepare: Prepare, compiled: LLMatcher) -> None:
        assert self._compiler is not None, "it has compiled the grammar"
        eos_ids = self._compiler.eos_ids
        never = self._compiler.guessed_eos_ids | (eos_ids if prepare.ignore_eos else set())
        early = eos_ids.union(prepare.stop_ids) if prepare.min_tokens else set()
        self._matchers[prepare.id] = Matcher(prepare, compiled.deep_copy(), never, early)

    def _compile(self) -> None:
        try:
            while True:
                prepare = self._to_compile.get()
                self._report(Prepared(prepare.id, self._compiled(prepare)))
        except ChannelClosed:  # nobody is left to be told
            pass

    def _compiled(self, prepare: Prepare) -> Failure | None:
        """Compile the grammar of a sequence that still waits and may begin then. Returns why it cannot."""
        if prepare.id not in self._waiting:
            return None
        try:
            compiler = self._compiler or self._load()
            try:
                compiled = compiler.compiled(prepare.grammar)
            except ValueError as error:
                return Failure(str(error)[:400], refused=True)
        except BaseException:  # whatever it is, the thread goes on, and the sequence ends
            logger.exception("A grammar could not be compiled.")
            return _BROKEN
        with self._lock:
            compiler.keep(prepare.grammar, compiled)
            if prepare.id in self._waiting:
                self._waiting.remove(prepare.id)
                self._add(prepare, compiled)
        return None

    def _load(self) -> GrammarCompiler:
        from llguidance import LLExecutor

        from quire.engine.structured_output.grammar_compiler import GrammarCompiler

        compiler = GrammarCompiler(*self._given)
        self._executor = LLExecutor(self._num_threads) if self._num_threads > 1 else None
        self._compiler = compiler
        return compiler
