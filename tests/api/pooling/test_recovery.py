"""Texts that are open when an engine dies: the next one pools them, and clients see nothing but a pause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
from msgspec.structs import replace

from quire.foundation.messages.from_engine import Dead, EngineId
from tests.api.pooling.pooler import EMBEDDER, Pooler, pooled, pooling
from tests.api.scripted import ready_to_pool
from tests.api.server import Server
from tests.api.test_lifetimes import eventually, in_background

SECOND = EngineId(0, 1)


def replace_engine(engine: Pooler, in_flight: list[int]) -> None:
    engine.say(Dead("planted", SECOND, in_flight, source=engine.engine))
    eventually(lambda: engine.engine == SECOND)
    engine.say(replace(ready_to_pool(EMBEDDER), source=SECOND))


def ask(server: Server) -> Any:
    body = {"input": [[5, 6, 7], [8, 9]], "model": "tiny"}
    return in_background(lambda: httpx.post(server.url + "/v1/embeddings", json=body, timeout=60))


def test_texts_go_on_in_the_next_engine(tmp_path: Path) -> None:
    with pooling(tmp_path, EMBEDDER) as (server, engine):
        engine.held = True
        thread, result = ask(server)
        first, second = engine.wait_for_adds(2)
        engine.finish(second)
        eventually(lambda: server.session.num_sequences == 1)
        replace_engine(engine, [first.id])
        (again,) = engine.wait_for_adds(1)
        assert again == first
        vector = pooled(first.tokens, first.pooling, EMBEDDER)
        message = engine.vector_of(again, vector)
        engine.say(replace(message, source=SECOND))
        thread.join()
        found = [entry["embedding"] for entry in result[0].json()["data"]]
        for embedding, tokens in zip(found, ([5, 6, 7], [8, 9]), strict=True):
            np.testing.assert_array_equal(np.float32(embedding), pooled(tokens, first.pooling, EMBEDDER))
        assert "vllm:prompt_tokens_total" in server.get("/metrics").text
        assert server.session.stats.engines[0].prompt_tokens == 5
        assert server.session.num_sequences == 0
