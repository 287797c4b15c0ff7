"""What is kept outlives a crash: real processes, the built-in model, SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import openai
import pytest

from tests.e2e.serve import QuireServe

COUNT = 100


@pytest.mark.long("api")
def test_responses_and_a_batch_outlive_a_crash(tmp_path: Path) -> None:
    flags = ("--port", "0", "--max-num-seqs", "4", "--responses-store-path", str(tmp_path / "store.sqlite"))
    body = {"input": "Count from one to ten.", "max_output_tokens": 16}
    lines = [{"custom_id": f"{i}", "method": "POST", "url": "/v1/responses", "body": body} for i in range(COUNT)]
    with QuireServe(*flags, "--max-restarts", "0") as server:
        server.wait_ready()
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
        first = client.responses.create(model="quill", input="What is the capital of France?", temperature=0)
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/responses", completion_window="24h"
        )  # fmt: skip
        deadline = time.monotonic() + 120
        while not (batch := client.batches.retrieve(batch.id)).request_counts or batch.request_counts.completed < 5:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(server.children()["api"], signal.SIGKILL)
        assert server.wait() == 70
    with QuireServe(*flags) as server:
        server.wait_ready()
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
        second = client.responses.create(
            model="quill", input="And of Italy?", previous_response_id=first.id, temperature=0
        )  # fmt: skip
        assert "Paris" in first.output_text
        assert "Rome" in second.output_text
        deadline = time.monotonic() + 120
        while (batch := client.batches.retrieve(batch.id)).status != "completed":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        results = [json.loads(line) for line in client.files.content(batch.output_file_id or "").text.splitlines()]
        assert [result["custom_id"] for result in results] == [f"{i}" for i in range(COUNT)]
        server.signal()
        assert server.wait() == 0
