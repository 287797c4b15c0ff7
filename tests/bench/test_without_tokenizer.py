"""`quire bench serve` against a real server that works on token ids only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from tests.api.server import Server, running
from tests.checkpoints import VOCAB_SIZE


def bench(directory: Path, server: Server, *arguments: str) -> dict[str, Any]:
    """Its result."""
    file = directory / "result.json"
    with pytest.raises(SystemExit) as ended:
        main([
            "bench", "serve", "--base-url", server.url, "--num-prompts", "6", "--input-len", "6", "--output-len", "4",
            "--save-result", "--save-detailed", "--result-dir", str(directory), "--result-filename", file.name,
            *arguments,
        ])  # fmt: skip
    found: dict[str, Any] = json.loads(file.read_text())
    assert not ended.value.code, found
    return found


@pytest.mark.parametrize("arguments", [[], ["--vocab-size", "50"]], ids=["asked for", "given"])
def test_token_ids_are_sent_and_counted(tmp_path: Path, arguments: list[str]) -> None:
    with running(tmp_path, skip_tokenizer_init=True, step_s=0.05) as server:
        found = bench(tmp_path, server, *arguments)
    assert (found["completed"], found["failed"]) == (6, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (36, 24)
    assert all(0 < ttft < 30 for ttft in found["ttfts"])
    assert all(1 <= len(gaps) <= 3 for gaps in found["itls"])  # the chunk that names the prompt's tokens brings none


def test_the_model_card_has_the_size_of_the_vocabulary(tmp_path: Path) -> None:
    with running(tmp_path, skip_tokenizer_init=True) as server:
        assert server.get("/v1/models").json()["data"][0]["vocab_size"] == VOCAB_SIZE
        assert server.get("/v1/models/alias").json()["vocab_size"] == VOCAB_SIZE
