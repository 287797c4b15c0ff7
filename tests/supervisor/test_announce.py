"""What is said when the server is ready."""

from __future__ import annotations

import socket

import pytest

from quire.config import Config
from quire.supervisor.announce import announce_ready


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpus_kv_cache_is_said_once_it_is_measured(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        announce_ready(Config().with_values(device=device), listener, 2.0, {"weights": 1.5}, 123_456)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "Ready in 2.0 s (engine: weights 1.5)"
    assert ("  KV cache            123,456 tokens, measured" in said) == (device == "cuda")
