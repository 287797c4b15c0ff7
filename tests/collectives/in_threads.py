"""Ranks as threads of this process: they divide a model as processes do, and start in no time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from quire.compute.collectives.layout import buffer_bytes, memory_bytes
from quire.compute.collectives.shared_memory import PlainRanks, Ranks, shared_memory_collectives
from quire.compute.mesh import Mesh
from quire.foundation.processes.shared_memory import SharedMemory

T = TypeVar("T")
PATIENCE_S = 60.0


def run_ranks(
    tp: int,
    body: Callable[[Mesh, Ranks], T],
    *,
    ep: int = 1,
    vocab_size: int = 1_000,
    plain: bool = False,
    patience_s: float = PATIENCE_S,
) -> list[T]:
    """What `body` returns in each rank. A rank that fails keeps the others waiting for `patience_s`."""
    memory = SharedMemory(memory_bytes(Mesh(tp=tp), vocab_size))

    def rank(number: int) -> T:
        mesh = Mesh(number, tp=tp, ep=ep)
        with torch.inference_mode():
            if plain:
                return body(mesh, PlainRanks(memory, mesh, buffer_bytes(mesh, vocab_size), patience_s))
            return body(mesh, shared_memory_collectives(memory, mesh, vocab_size, spins=0, patience_s=patience_s))

    with ThreadPoolExecutor(tp, "rank") as pool:
        futures = [pool.submit(rank, number) for number in range(tp)]
        errors = [error for future in futures if (error := future.exception())]
    for error in errors:
        raise error
    return [future.result() for future in futures]


by_kernels_and_torch = pytest.mark.parametrize("plain", [False, True], ids=["kernels", "torch"])
