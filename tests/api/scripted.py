"""An engine that does what the test says: for states that a real one passes through too quickly."""

from __future__ import annotations

import queue
import time

import msgspec
import numpy as np
import numpy.typing as npt

from quire.engine.client import Lost
from quire.foundation.messages.from_engine import (
    Deltas,
    End,
    EndReason,
    EngineId,
    FromEngine,
    Heartbeat,
    PoolingInfo,
    Ready,
)
from quire.foundation.messages.to_engine import Abort, Add, ClientHeartbeat, Control, ToEngine
from tests.api.server import MAX_MODEL_LEN
from tests.checkpoints import VOCAB_SIZE

READY = Ready("tiny", MAX_MODEL_LEN, VOCAB_SIZE, num_blocks=256, block_size=16, capacity=MAX_MODEL_LEN)


def ready_to_pool(info: PoolingInfo) -> Ready:
    """The Ready of an engine that makes this of whole texts."""
    return msgspec.structs.replace(READY, pooling=info)


class ScriptedClient:
    """EngineClient whose engine says only what `say` is given.

    Attributes:
        adds, aborted, heartbeats: What the server sent: sequences, ids, and how many.
        controls: Commands, each with the number of Adds before it.
    """

    number = 3
    engine = EngineId()

    def __init__(self) -> None:
        self.adds: list[Add] = []  # one for each sequence
        self.aborted: list[int] = []
        self.controls: list[tuple[str, int]] = []
        self.heartbeats = 0
        self.closed = False
        self._said: queue.SimpleQueue[FromEngine | Lost | Exception] = queue.SimpleQueue()

    def send(self, message: ToEngine) -> None:
        match message:
            case Add():
                self.adds += message.sequences()
            case Abort(ids):
                self.aborted += ids
            case ClientHeartbeat(client):
                assert client == self.number
                self.heartbeats += 1
            case Control(_, action):
                self.controls.append((action, self.prompts))

    @property
    def prompts(self) -> int:
        """How many Adds came. Counted in `adds`: a test never sees one without the other."""
        return sum(add.fork_of is None for add in self.adds)

    def connect(self, engine: EngineId) -> None:
        self.adds.clear()
        self.controls.clear()
        self.engine = engine  # tests wait for it, and look then at what the new one has got

    def receive(self, timeout: float | None) -> FromEngine | Lost | None:
        try:
            message = self._said.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(message, Exception):
            raise message
        return message

    def close(self) -> None:
        self.closed = True

    def say(self, message: FromEngine | Lost | Exception) -> None:
        """The engine's next message, or how the connection breaks."""
        self._said.put(message)

    def tokens(self, add: Add, tokens: list[int]) -> None:
        """A step brings tokens to one sequence."""
        self.say(Deltas([add.id], [len(tokens)], tokens))

    def vector(self, add: Add, values: npt.ArrayLike) -> None:
        """A pooled sequence ends with its vector, [dim] or [tokens, dim]."""
        self.say(self.vector_of(add, values))

    @staticmethod
    def vector_of(add: Add, values: npt.ArrayLike) -> Deltas:
        """The message that ends a pooled sequence with its vector."""
        array = np.asarray(values, dtype="<f4")
        end = End(add.id, "stop", vector=array.tobytes(), vector_shape=list(array.shape))
        return Deltas([], [], [], ends=[end])

    @staticmethod
    def end(add: Add, reason: EndReason) -> End:
        """The last message of a sequence."""
        return End(add.id, reason)

    def beat(self, stalled: float = 0.0, limit: float = 4.0) -> None:
        """A heartbeat, whose engine has not moved for `stalled` seconds, of `limit`."""
        now = time.monotonic()
        self.say(Heartbeat(now, now - stalled, limit_s=limit))

    def wait_for_adds(self, count: int) -> list[Add]:
        """Return once the server has sent that many."""
        deadline = time.monotonic() + 60
        while len(self.adds) < count:
            assert time.monotonic() < deadline, f"{len(self.adds)} requests came, not {count}"
            time.sleep(0.01)
        return self.adds
