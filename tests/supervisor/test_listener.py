"""What is said when there is nothing to listen on."""

from __future__ import annotations

import socket

import pytest

from quire.errors import AddressInUseError, ConfigError
from quire.foundation.config import ServerConfig
from quire.serving.supervisor.listener import listen


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("no.such.host.invalid", "this name is not known here"),
        ("192.0.2.1", "this machine has no such address"),
        ("a" * 70 + ".x", "this name is not known here"),
    ],
)
def test_an_address_of_nobody_is_said_in_words(host: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        listen(ServerConfig(host=host, port=0))
    assert caught.value.message.startswith(f"Cannot listen on --host {host}: {said}")
    assert "Errno" not in caught.value.message
    assert caught.value.param == "host"


def test_a_taken_port_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUseError, match=f"Port {port} is taken by another program"):
            listen(ServerConfig(host="127.0.0.1", port=port))
