"""A server of a speech model over a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.engine.build import build_model_runtime_info
from quire.engine.inprocess import InProcessClient
from quire.engine.thinking_budgets import bitmask_source
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config
from quire.planning.auto_config import resolve
from quire.runtime.executor.factory import build_executor
from tests.api.server import Server


@contextmanager
def serve(model: Path, **settings: Any) -> Iterator[Server]:
    """A context in which a model is served as `tiny`, in fp32."""
    found = resolve(
        Config().with_values(
            model=str(model),
            dtype="float32",
            served_model_name=("tiny",),
            responses_store_path=str(model.parent / "store.sqlite"),
            disable_log_stats=True,
            **settings,
        )
    )
    clock, info = SystemClock(), build_model_runtime_info(found.config, found.spec)
    masker = bitmask_source(found.config, found.spec.vocab_size)

    def client() -> InProcessClient:
        return InProcessClient(found.config, build_executor(found.config, clock), clock, info, masker)

    with Server(found.config, client, vocab_size=found.spec.vocab_size) as server:
        yield server.wait_ready()
