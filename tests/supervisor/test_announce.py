"""What is said when the server is ready."""

from __future__ import annotations

import socket

import pytest

from quire.foundation.config import Config
from quire.serving.supervisor.announce import announce_ready


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpus_kv_cache_is_said_once_it_is_measured(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        announce_ready(Config().with_values(device=device), listener, 2.0, {"weights": 1.5}, 123_456)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "Ready in 2.0 s (engine: weights 1.5)"
    assert ("  KV cache            123,456 tokens, measured" in said) == (device == "cuda")


@pytest.mark.parametrize("text", [True, False])
def test_without_a_tokenizer_nothing_that_needs_text_is_said(text: bool, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config().with_values(device="cpu", skip_tokenizer_init=not text)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        announce_ready(config, listener, 2.0, {}, 0)
    said = capsys.readouterr().err
    assert ("chat in a browser" in said) == ("/v1/chat/completions" in said) == text
    assert ("/inference/v1/generate" in said) == (not text)


@pytest.mark.parametrize(
    ("task", "path"),
    [("embed", "/v1/embeddings"), ("classify", "/classify"), ("score", "/rerank"), ("token_embed", "/pooling")],
)
@pytest.mark.parametrize("text", [True, False])
def test_a_model_without_text_is_tried_where_it_answers(
    task: str, path: str, text: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config().with_values(device="cpu", skip_tokenizer_init=not text)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        announce_ready(config, listener, 2.0, {}, 0, task)
    said = capsys.readouterr().err
    assert (path if text else "/pooling") in said
    assert "chat" not in said
