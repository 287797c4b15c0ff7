"""Batch files whose lines ask for vectors, labels, scores and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.api.batches.test_batches import connect, line, results, start, wait
from tests.api.pooling.pooler import EMBEDDER
from tests.api.server import running

BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["a quick", "fox"], "dimensions": 8},
    "/v1/rerank": {"query": "a", "documents": ["a fox", "b"]},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v2/embed": {"texts": ["a"]},
    "/pooling": {"input": "a"},
}
UNLIKE = ("id", "created")
"""Fields that no two answers share."""


def test_a_batch_of_each_endpoint(tmp_path: Path) -> None:
    with running(tmp_path, pooling=EMBEDDER) as server:
        client = connect(server)
        for path, body in BODIES.items():
            lines = [line("one", body, path), line("two", {**body, "nonsense_of": 5, "timeout": -1.0}, path)]
            batch = wait(client, start(client, lines, path))
            assert batch.status == "completed"
            (good,), (bad,) = results(client, batch.output_file_id), results(client, batch.error_file_id)
            alone = server.post(path, body).json()
            found = good["response"]["body"]
            assert {name: found[name] for name in found if name not in UNLIKE} == {
                name: alone[name] for name in alone if name not in UNLIKE
            }
            assert (bad["custom_id"], bad["response"]["status_code"]) == ("two", 400)


@pytest.mark.parametrize("path", ["/v1/moderations", "/tokenize"])
def test_other_endpoints_are_refused(tmp_path: Path, path: str) -> None:
    with running(tmp_path, pooling=EMBEDDER) as server:
        answer = server.post("/v1/batches", {"input_file_id": "x", "endpoint": path, "completion_window": "24h"})
        assert answer.status_code == 400
        assert "/v1/embeddings" in answer.json()["error"]["message"]
