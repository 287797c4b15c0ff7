"""Which nodes the head takes, and what it says of those that it does not, and of those that do not come."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.errors import EngineDeadError
from quire.foundation.clock import SystemClock
from quire.runtime.executor.nodes.connection import receive_message, send_message
from quire.runtime.executor.nodes.gate import Gate
from quire.runtime.executor.nodes.link_setup import connect
from quire.runtime.executor.nodes.node_messages import Join, Refused, ToNode
from quire.runtime.executor.nodes.roll_call import RemoteNode, RollCall, model_fingerprint, shape_of
from quire.version import __version__
from tests.checkpoints import make_llama
from tests.worker.driver import config_for

KEY = b"0123456789abcdef"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tiny"), tokenizer=False)


class Call:
    """A roll call for nodes 1 and 2 that runs in a thread. Its patience ends when the test says so."""

    def __init__(self, tiny: Path, gate: Gate) -> None:
        self._config = config_for(tiny, pipeline_parallel_size=3, nnodes=3, distributed_timeout_seconds=60)
        self._gate = gate
        self._seconds = 0.0
        self._roll = RollCall(self._config, self)
        self.nodes: list[RemoteNode] = []
        self.error = ""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._ends: list[socket.socket] = []

    def now(self) -> float:
        return self._seconds

    def wait_joined(self, *nodes: int) -> None:
        """Until these have, and no others: each connection is heard in a thread of its own, so the first that connects
        need not be the first that arrives."""
        deadline = time.monotonic() + 60
        while {*self._roll._joined} != {*nodes}:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def lose_patience(self) -> None:
        self._seconds = 61.0

    def join(self, node: int, /, **changes: Any) -> socket.socket:
        """Another machine tries to join."""
        own = Join(__version__, node, shape_of(self._config.parallel), "", f"host{node}", 1234)
        model = model_fingerprint(self._config.model.model)
        end = connect(("127.0.0.1", self._gate.port), KEY)
        self._ends.append(end)
        send_message(end, msgspec.msgpack.encode(msgspec.structs.replace(own, **{"model": model} | changes)))
        return end

    def end(self) -> None:
        self._thread.join(90)
        assert not self._thread.is_alive()
        for end in self._ends:
            end.close()

    def _run(self) -> None:
        try:
            self.nodes = self._roll.wait(self._gate)
        except EngineDeadError as error:
            self.error = error.message


@pytest.fixture
def gate() -> Iterator[Gate]:
    with Gate("127.0.0.1", 0, KEY) as opened:
        yield opened


def answer(end: socket.socket) -> Any:
    return msgspec.msgpack.decode(receive_message(end, 10_000), type=ToNode)


def test_nodes_come_in_any_order_and_get_their_ranks(tiny: Path, gate: Gate) -> None:
    call = Call(tiny, gate)
    call.join(2)
    call.join(1)
    call.end()
    assert [(node.name(node.ranks[0]), node.address) for node in call.nodes] == [
        ("Rank 1 of 3 (node 1, host1)", ("127.0.0.1", 1234)),
        ("Rank 2 of 3 (node 2, host2)", ("127.0.0.1", 1234)),
    ]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"version": "0.0.9"}, f"it runs Quire 0.0.9, the head {__version__}: install the same version"),
        ({"model": "another"}, "its model's files are not the head's"),
        ({"shape": "--nnodes 2"}, "it was started with --nnodes 2, the head with --nnodes 3 --tensor-parallel-size 1"),
        ({"node": 3}, "there is no node 3: --node-rank is 1 to 2"),
        ({"node": 0}, "there is no node 0: --node-rank is 1 to 2"),
    ],
)
def test_a_node_that_does_not_fit_is_told_why_and_named_if_nobody_else_comes(
    tiny: Path, gate: Gate, changes: dict[str, Any], why: str
) -> None:
    call = Call(tiny, gate)
    call.join(2)
    call.wait_joined(2)
    refused = answer(call.join(1, **changes))
    assert isinstance(refused, Refused)
    assert refused.is_final
    assert why in refused.message
    call.lose_patience()
    call.end()
    assert call.error.startswith("Node 1 of 3 did not join within 60 s")
    assert f"host1 (127.0.0.1) was refused: {why}" in call.error


def test_a_second_machine_of_a_number_may_come_once_the_first_is_gone(tiny: Path, gate: Gate) -> None:
    call = Call(tiny, gate)
    first = call.join(1)
    call.wait_joined(1)
    refused = answer(call.join(1, host="other"))
    assert refused == Refused("another machine has joined as node 1: give each a --node-rank of its own", False)
    first.close()
    call.join(1, host="third")
    call.join(2)
    call.end()
    assert call.nodes[0].name(1) == "Rank 1 of 3 (node 1, third)"


def test_a_node_that_leaves_before_all_are_there_is_missing(tiny: Path, gate: Gate) -> None:
    call = Call(tiny, gate)
    first = call.join(1)
    call.wait_joined(1)
    first.close()
    call.join(2)
    call.wait_joined(2)
    call.lose_patience()
    call.end()
    assert call.error.startswith("Node 1 of 3 did not join within 60 s")


def test_a_fingerprint_is_of_the_model_wherever_it_lies(tiny: Path, tmp_path: Path) -> None:
    copy, other = make_llama(tmp_path / "copy", tokenizer=False), make_llama(tmp_path / "other", tokenizer=False)
    assert model_fingerprint(str(copy)) == model_fingerprint(str(tiny))
    with (other / "model.safetensors").open("ab") as weights:
        weights.write(b"more")
    assert model_fingerprint(str(other)) != model_fingerprint(str(tiny))
    with suppress(OSError):
        (copy / "tokenizer_config.json").write_text("{}")
    assert model_fingerprint(str(copy)) == model_fingerprint(str(tiny))


def test_where_ray_starts_nodes_the_advice_is_to_look_there(tiny: Path) -> None:
    settings = {"pipeline_parallel_size": 2, "nnodes": 2, "distributed_timeout_seconds": 1}
    config = config_for(tiny, **settings, distributed_executor_backend="ray")
    with Gate("127.0.0.1", 0, KEY) as gate, pytest.raises(EngineDeadError, match="'ray status', why Ray has not"):
        RollCall(config, SystemClock()).wait(gate)
