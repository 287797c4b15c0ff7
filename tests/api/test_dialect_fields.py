"""What dialects call their fields, in errors that come while an answer is made."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.foundation.messages.from_engine import Deltas, End
from tests.api.scripted import READY, ScriptedClient
from tests.api.server import Server, resolved
from tests.api.speaker import TEMPLATE

QUESTION = [{"role": "user", "content": "How are you?"}]
SCHEMA: dict[str, Any] = {"type": "object"}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": (
        "response_format",
        {"messages": QUESTION, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ),
    "/v1/messages": (
        "output_config.format",
        {
            "messages": QUESTION,
            "max_tokens": 9,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    "/api/chat": ("format", {"model": "tiny", "messages": QUESTION, "format": SCHEMA}),
    "/api/generate": ("format", {"model": "tiny", "raw": True, "prompt": "a", "format": SCHEMA}),
    "/v1/responses": (
        "text.format",
        {"input": "How are you?", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    ),
    "/inference/v1/generate": (
        "sampling_params.structured_outputs",
        {"token_ids": [3, 4], "sampling_params": {"structured_outputs": {"json": SCHEMA}}},
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", FORMATS)
def test_a_grammar_that_the_engine_refuses_late_is_named_as_the_client_did(
    tmp_path: Path, path: str, stream: bool
) -> None:
    engine = ScriptedClient()
    name, body = FORMATS[path]
    config = resolved(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with Server(config, lambda: engine) as server, ThreadPoolExecutor(1) as threads:
        engine.say(READY)
        server.wait_ready()
        asked = threads.submit(server.post, path, {**body, "stream": stream})
        (add,) = engine.wait_for_adds(1)
        engine.say(Deltas([], [], [], ends=[End(add.id, "refused", "it has too many states.")]))
        answer = asked.result()
    assert answer.status_code == (200 if stream else 400)
    assert f'"{name}: it has too many states."' in answer.text
