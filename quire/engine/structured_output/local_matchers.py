"""Follows sequences in the engine's own process, where a token costs microseconds: light grammars, small vocabularies.

A message to another process and back costs a step on a CPU a third of its time, since kernels keep all cores busy. Only
grammars that the matcher process has compiled and found light come here, under limits that bound what a token may cost;
a sequence that hits one goes on in the matcher process. Grammars compile in a thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quire.engine.structured_output.matcher_messages import Filled, Prepare, Row
from quire.foundation.processes.helper_process import STACK_BYTES

if TYPE_CHECKING:  # the compiler is imported with the first grammar
    from llguidance import LLMatcher

    from quire.engine.structured_output.compiled_grammars import GrammarCache
    from quire.engine.structured_output.matchers import Matchers

MOST_TOKENS = 2**15
"""Of a vocabulary whose masks are filled in the engine's process: a fill takes time in proportion."""


class LocalMatchers:
    """The matchers of one engine. For its thread.

    Args:
        model: Its directory.
        tokenizer: The tokenizer's directory.
        vocab_size: Of the model.
        most_masks: Bitmasks that are asked for at once.

    Attributes:
        masks: [most_masks, bytes] uint8, of the rows that were filled last.
    """

    def __init__(self, model: str, tokenizer: str, vocab_size: int, most_masks: int) -> None:
        self.masks = np.zeros((most_masks, 4 * -(-vocab_size // 32)), dtype=np.uint8)
        self._paths = Path(model), Path(tokenizer)
        self._vocab_size = vocab_size
        self._matchers: Matchers | None = None
        self._cache: GrammarCache | None = None
        self._followed: set[int] = set()
        self._to_compile: queue.SimpleQueue[Prepare] = queue.SimpleQueue()
        self._compiled: queue.SimpleQueue[tuple[Prepare, LLMatcher | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def follows(self, sequence: int) -> bool:
        """Whether this sequence is followed here."""
        return sequence in self._followed

    def add(self, prepare: Prepare) -> bool:
        """Follow a sequence from now on, if its grammar is known here."""
        pristine = None if self._cache is None else self._cache.get(prepare.grammar)
        if pristine is None or self._matchers is None:
            return False
        self._matchers.add(prepare, pristine)
        self._followed.add(prepare.id)
        return True

    def compile(self, prepare: Prepare) -> None:
        """Have a light grammar compiled; `compiled` names the sequence then."""
        if self._thread is None:
            stack_bytes = threading.stack_size(STACK_BYTES)
            self._thread = threading.Thread(target=self._compile, name="grammars", daemon=True)
            self._thread.start()
            threading.stack_size(stack_bytes)
        self._to_compile.put(prepare)

    def compiled(self) -> list[Prepare]:
        """The sequences whose grammars have been compiled since the last call. `add` refuses those that failed."""
        ready = []
        while not self._compiled.empty():
            prepare, matcher = self._compiled.get()
            if matcher is not None and self._cache is not None:
                self._cache.keep(prepare.grammar, matcher)
            ready.append(prepare)
        return ready

    def forget(self, sequence: int) -> None:
        """A sequence is over, or goes on elsewhere."""
        if sequence in self._followed and self._matchers is not None:
            self._followed.remove(sequence)
            self._matchers.forget(sequence)

    def fill(self, rows: Sequence[Row]) -> Filled:
        """Fill `masks`; see `Matchers.fill`."""
        assert self._matchers is not None, "no sequence is followed"
        return self._matchers.fill(rows, self.masks)

    def _compile(self) -> None:
        from quire.engine.structured_output.compiled_grammars import (
            GrammarCache,
            compile_grammar,
            load_grammar_tokenizer,
        )
        from quire.engine.structured_output.limits import light_limits
        from quire.engine.structured_output.matchers import Matchers

        tokenizer, eos_ids = load_grammar_tokenizer(*self._paths, self._vocab_size)
        limits = light_limits()
        self._matchers, self._cache = Matchers(tokenizer, eos_ids, threads=1), GrammarCache()
        while True:
            prepare = self._to_compile.get()
            try:
                self._compiled.put((prepare, compile_grammar(tokenizer, prepare.grammar, limits)))
            except ValueError:
                self._compiled.put((prepare, None))
