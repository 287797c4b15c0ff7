"""How the API server and `LLM` reach an engine: `EngineClient`, and its form over ZMQ with the engine's end.

`quire.engine.inprocess` has the client of an engine in the same process.

ZMQ is used only here, over ipc sockets in a private directory. Messages are msgpack of the structs in
`quire.foundation.messages`. A request that does not decode is answered with an error; a client is told when a message
to it does not. The directory is readable by its owner only, so the sockets are as private as a Unix socket can be.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from quire.engine.port import Undecodable
from quire.foundation.messages.from_engine import Dead, EngineId, FromEngine
from quire.foundation.messages.to_engine import DECODING_ERRORS, Abort, Add, ClientGone, ToEngine

logger = logging.getLogger(__name__)
_FORKS = 1 + Add.__struct_fields__.index("forks")
"""Index of `Add.forks` in an encoded Add, after the type's name."""
INTAKE_BYTES = 2**17
"""Bytes of messages that the engine takes in one turn of its loop, up to the message that goes beyond it: some 10 ms of
work. Others wait for the next turn, so a crowd of prompts does not hold up a step."""
SEQUENCE_BYTES = 640
"""What a sequence counts for beside the bytes of its message: a message may begin or end many."""


@dataclass(frozen=True)
class Lost:
    """Stands in place of a message from the engine that could not be decoded, so its contents are unknown."""

    reason: str


class EngineClient(Protocol):
    """One connection to one engine.

    `send` may be called from one thread while another one waits in `receive`.
    """

    @property
    def number(self) -> int:
        """The client's number: ids that it makes are `number << CLIENT_SHIFT | counter`."""

    @property
    def engine(self) -> EngineId:
        """The engine that it is connected to."""

    def send(self, message: ToEngine) -> None:
        """Send a message; never waits for the engine."""

    def connect(self, engine: EngineId) -> None:
        """Send to this engine from now on. Messages of the one before it may still be received."""

    def receive(self, timeout: float | None) -> FromEngine | Lost | None:
        """The next message, or None after `timeout` seconds (None: wait for ever).

        The first message of a working engine is Ready. After Lost, the state of open requests is unknown.
        """

    def close(self) -> None:
        """Disconnect; an engine in this process stops."""


class ZmqClient:
    """EngineClient of an engine in another process.

    `send` and `receive` may be called from different threads, each from one at a time.
    """

    def __init__(self, directory: Path, number: int, engine: EngineId) -> None:
        self._directory = directory
        self.number = number
        self.engine = engine
        self._context = zmq.Context()
        self._outbox = _push(self._context, engine_address(directory, engine))
        self._inbox = _pull(self._context, client_address(directory, number, engine.engine))
        self._sending = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

    def send(self, message: ToEngine) -> None:
        with self._sending:
            self._outbox.send(self._encoder.encode(message))

    def fileno(self) -> int:
        """A descriptor that becomes readable when there may be messages, and stays so until `receive` returns None."""
        return int(self._inbox.get(zmq.FD))

    def receive(self, timeout: float | None) -> FromEngine | Lost | None:
        if timeout == 0.0:
            if not int(self._inbox.get(zmq.EVENTS)) & zmq.POLLIN:
                return None
        elif not self._inbox.poll(None if timeout is None else int(timeout * 1e3)):
            return None
        try:
            return self._decoder.decode(self._inbox.recv())
        except DECODING_ERRORS as error:
            logger.error("a message from the engine cannot be decoded: %s", error)
            return Lost(str(error))

    def connect(self, engine: EngineId) -> None:
        with self._sending:
            self._outbox.close(linger=0)
            self.engine = engine
            self._outbox = _push(self._context, engine_address(self._directory, engine))

    def close(self) -> None:
        self._outbox.close()
        self._inbox.close()
        self._context.term()


def engine_address(directory: Path, engine: EngineId) -> str:
    """Where an engine listens: an address for each of its lives, so that none gets messages for one before."""
    return f"ipc://{directory / f'engine-{engine.engine}-{engine.epoch}'}"


def client_address(directory: Path, number: int, engine: int) -> str:
    """Where API process `number` listens to one engine, in whatever life."""
    return f"ipc://{directory / f'client-{number}-{engine}'}"


def _push(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.set(zmq.SNDHWM, 0)  # never block the loop; heartbeats and bounded streams bound the memory
    socket.set(zmq.LINGER, 500)
    socket.connect(address)
    return socket


def _pull(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 0)
    socket.bind(address)
    return socket


class ZmqPort:
    """The engine's Port: one inbox, and a socket to each known client. Each message says which engine sends it."""

    def __init__(self, directory: Path, engine: EngineId) -> None:
        self._directory = directory
        self._engine = engine
        self._context = zmq.Context()
        self._inbox = _pull(self._context, engine_address(directory, engine))
        self._clients: dict[int, zmq.Socket[bytes]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def drain(self, wait: float | None) -> list[ToEngine | Undecodable]:
        messages: list[ToEngine | Undecodable] = []
        if not self._inbox.poll(None if wait is None else int(wait * 1e3)):
            return messages
        taken = 0
        while taken < INTAKE_BYTES:
            try:
                raw = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                message = self._decoder.decode(raw)
                messages.append(message)
                taken += len(raw) + SEQUENCE_BYTES * _num_sequences(message)
            except DECODING_ERRORS as error:
                messages += _undecodable_messages(raw, error)
                taken += len(raw)
        return messages

    def send(self, client: int, message: FromEngine) -> None:
        socket = self._clients.get(client)
        if socket is None:
            socket = self._clients[client] = _push(
                self._context, client_address(self._directory, client, self._engine.engine)
            )
        socket.send(self._encoder.encode(msgspec.structs.replace(message, source=self._engine)))

    def forget(self, client: int) -> None:
        socket = self._clients.pop(client, None)
        if socket is not None:
            socket.close(linger=0)

    def close(self) -> None:
        """Close, after up to half a second for queued messages."""
        for socket in (*self._clients.values(), self._inbox):
            socket.close()
        self._context.term()


def _num_sequences(message: ToEngine) -> int:
    match message:
        case Add(forks=forks):
            return 1 + len(forks)
        case Abort(ids):
            return len(ids)
    return 1


def _undecodable_messages(raw: bytes, error: Exception) -> list[Undecodable]:
    """Who waits for an answer to a message that does not decode; empty if that cannot be read either."""
    try:
        fields = msgspec.msgpack.decode(raw)
    except DECODING_ERRORS:
        fields = None
    match fields:
        case ["Add", int(first), *_] if first >= 0:
            forks = fields[_FORKS] if len(fields) > _FORKS and isinstance(fields[_FORKS], list) else []
            others = [fork[0] for fork in forks if isinstance(fork, list) and fork and isinstance(fork[0], int)]
            logger.error("request %d cannot be decoded, it fails: %s", first, error)
            return [Undecodable(str(error), (first, *(other for other in others if other >= 0)))]
        case ["Control", int(number), *_] if number >= 0:
            logger.error("control %d cannot be decoded, it fails: %s", number, error)
            return [Undecodable(str(error), control=number)]
    logger.error(
        "DROPPED a message of %d bytes that cannot be decoded; whoever sent it may wait for ever: %s", len(raw), error
    )
    return []


class DeathNotices:
    """Tells clients and engines about the death of the other side, for the process that saw it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._clients: dict[tuple[int, int], zmq.Socket[bytes]] = {}  # by client and engine

    def engine_died(self, client: int, message: Dead) -> None:
        """Tell a client; it need not listen yet."""
        way = client, message.source.engine
        socket = self._clients.get(way)
        if socket is None:
            socket = self._clients[way] = _push(self._context, client_address(self._directory, *way))
        socket.send(self._encoder.encode(message))

    def client_died(self, engine: EngineId, client: int) -> None:
        """Tell an engine, if it listens, that a client is gone."""
        if (old := self._clients.pop((client, engine.engine), None)) is not None:
            old.close(linger=0)
        socket = _push(self._context, engine_address(self._directory, engine))
        socket.send(self._encoder.encode(ClientGone(client)))
        socket.close()

    def close(self) -> None:
        """Close, after up to half a second for queued messages."""
        for socket in self._clients.values():
            socket.close()
        self._context.term()
