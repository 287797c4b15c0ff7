"""llama.cpp, compiled for this machine by llama-cpp-python, on a GGUF file, or on one in bf16 that is made from the
checkpoint once.

Requests are served as llama.cpp's own server does: a slot each, and in a step the next token of all that run, together
with the prompts of those that have just begun.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import numpy as np

from engines.llama_cpp_files import converted

PACKAGES = ("llama-cpp-python", "gguf")
BUILD = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF"}
"""For its compilation."""
_CONTEXT = 1024
_STEP_TOKENS = 2048


@dataclass
class _Running:
    """A request with a slot: what it feeds next, how far it is, and how many tokens it still wants."""

    number: int
    tokens: list[int]
    position: int
    wanted: int


class Engine:
    """See the package."""

    version = llama_cpp.__version__

    def __init__(self, checkpoint: str, max_running: int) -> None:
        threads = len(os.sched_getaffinity(0))
        path = Path(checkpoint)
        path = path if path.is_file() else converted(path)
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = _CONTEXT * max_running, _STEP_TOKENS, max_running
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(_STEP_TOKENS, 0, 1)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._slots = max_running

    def generate(self, prompts: Sequence[list[int]], outputs: Sequence[int]) -> list[int]:
        counts = [0] * len(prompts)
        waiting = list(reversed(range(len(prompts))))
        running: dict[int, _Running] = {}
        while waiting or running:
            for slot in range(self._slots):
                if slot not in running and waiting:
                    number = waiting.pop()
                    llama_cpp.llama_memory_seq_rm(self._memory, slot, -1, -1)
                    running[slot] = _Running(number, list(prompts[number]), 0, outputs[number])
            for slot, token in self._step(running):
                request = running[slot]
                counts[request.number] += 1
                request.tokens, request.wanted = [token], request.wanted - 1
                if not request.wanted:
                    del running[slot]
        return counts

    def _step(self, running: dict[int, _Running]) -> Iterator[tuple[int, int]]:
        """Feed what is next of every request, as far as a step holds it; tokens by the slots that got one."""
        batch, size, sampled = self._batch, 0, []
        for slot, request in running.items():
            fed = min(len(request.tokens), _STEP_TOKENS - size)
            for token in request.tokens[:fed]:
                batch.token[size], batch.pos[size] = token, request.position
                batch.n_seq_id[size], batch.seq_id[size][0], batch.logits[size] = 1, slot, 0
                request.position += 1
                size += 1
            del request.tokens[:fed]
            if fed and not request.tokens:
                batch.logits[size - 1] = 1
                sampled.append((slot, size - 1))
        batch.n_tokens = size
        if failed := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {failed}")
        for slot, row in sampled:
            logits = llama_cpp.llama_get_logits_ith(self._context, row)
            values = np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._vocabulary,))
            yield slot, int(values.argmax())
