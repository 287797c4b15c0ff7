"""`python -m quire.engine.structured_output.matcher_process`: follows constrained sequences and fills their bitmasks.

Grammars compile in a thread beside the one that fills, so that running sequences do not wait for new ones.
"""

from __future__ import annotations

import argparse
import mmap
import queue
import socket
import threading
import time
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from quire.engine.structured_output.compiled_grammars import GrammarCache, compile_grammar, load_grammar_tokenizer
from quire.engine.structured_output.limits import LIGHT_COMPILE_MS, LIGHT_FILL_MS, LIGHT_GRAMMAR_BYTES, parser_limits
from quire.engine.structured_output.matcher_messages import (
    Fill,
    Filled,
    Forget,
    FromMatchers,
    Prepare,
    Prepared,
    Row,
    ToMatchers,
)
from quire.engine.structured_output.matchers import GRAMMAR_LOST, MOST_THREADS, Bitmasks, Matchers
from quire.foundation.processes.helper_process import Channel, ChannelClosed, run_helper
from quire.runtime.worker.startup.threads import usable_cores

_Channel = Channel[FromMatchers, ToMatchers]


def main(connection: socket.socket) -> None:
    """Do what the engine says until it is gone."""
    arguments = _arguments()
    channel: _Channel = Channel(connection, ToMatchers)  # type: ignore[arg-type]  # a union is no type to mypy
    size = 4 * -(-arguments.vocab_size // 32)
    shared = mmap.mmap(arguments.masks_fd, 0)
    masks = np.frombuffer(shared, dtype=np.uint8)
    masks = masks[: len(masks) // size * size].reshape(-1, size)
    _Worker(channel, masks, arguments).run()


class _Worker:
    """The two threads: this one fills, the other one compiles."""

    def __init__(self, channel: _Channel, masks: Bitmasks, arguments: argparse.Namespace) -> None:
        self._channel = channel
        self._masks = masks
        self._arguments = arguments
        self._matchers: Matchers | None = None
        self._lock = threading.Lock()
        self._to_compile: queue.SimpleQueue[Prepare] = queue.SimpleQueue()
        self._waiting: set[int] = set()

    def run(self) -> None:
        threading.Thread(target=self._compile, name="compile", daemon=True).start()
        while True:
            match self._channel.receive(None):
                case Prepare() as prepare:
                    with self._lock:
                        self._waiting.add(prepare.id)
                    self._to_compile.put(prepare)
                case Forget(sequence):
                    self._forget(sequence)
                case Fill(rows):
                    self._channel.send(self._fill(rows))

    def _fill(self, rows: list[Row]) -> Filled:
        if self._matchers is None:  # sequences of a process that was lost before this one
            return Filled(["failed"] * len(rows), dict.fromkeys(range(len(rows)), GRAMMAR_LOST))
        return self._matchers.fill(rows, self._masks)

    def _forget(self, sequence: int) -> None:
        with self._lock:
            self._waiting.discard(sequence)
            if self._matchers is not None:
                self._matchers.forget(sequence)

    def _compile(self) -> None:
        try:
            given = self._arguments
            tokenizer, eos_ids = load_grammar_tokenizer(given.model, given.tokenizer, given.vocab_size)
            grammars = _TriedGrammars(tokenizer)
            self._matchers = Matchers(tokenizer, eos_ids, max(1, min(MOST_THREADS, usable_cores() - 1)))
            while True:
                self._prepare(self._to_compile.get(), grammars, self._matchers)
        except ChannelClosed:
            pass

    def _prepare(self, prepare: Prepare, grammars: _TriedGrammars, matchers: Matchers) -> None:
        error, light = "", False
        try:
            pristine, light = grammars.matcher(prepare.grammar)
            with self._lock:
                if prepare.id in self._waiting:
                    self._waiting.remove(prepare.id)
                    matchers.add(prepare, pristine)
        except ValueError as refused:
            error = str(refused)[:400]
        self._channel.send(Prepared(prepare.id, error, light))


class _TriedGrammars:
    """Compiled grammars, and whether they are light."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._limits = parser_limits()
        self._cache = GrammarCache()
        self._light: set[str] = set()

    def matcher(self, grammar: str) -> tuple[LLMatcher, bool]:
        """The matcher of a grammar, not to be changed, and whether it is light; see limits.py.

        Raises:
            ValueError: It does not compile.
        """
        matcher = self._cache.get(grammar)
        if matcher is None:
            began = time.thread_time()
            matcher = compile_grammar(self._tokenizer, grammar, self._limits)
            compiled = time.thread_time()
            matcher.deep_copy().compute_bitmask()
            filled = time.thread_time()
            quick = compiled - began <= LIGHT_COMPILE_MS / 1e3 and filled - compiled <= LIGHT_FILL_MS / 1e3
            self._cache.keep(grammar, matcher)
            self._light = {light for light in self._light if light in self._cache}
            if quick and len(grammar) <= LIGHT_GRAMMAR_BYTES:
                self._light.add(grammar)
        return matcher, grammar in self._light


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--masks-fd", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    return parser.parse_known_args()[0]


if __name__ == "__main__":
    run_helper(main)
