"""The other API processes of the server: what all of them have to know or to say, and what they have counted together.

Each process has a datagram socket in the server's private directory, named by the process's place, so a successor is
found where its predecessor was. Nobody waits long for a process that is dead, stopped or busy; a process that starts
later learns from the engines what there is. A lone process does nothing here.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.metrics.prometheus import read_process
from quire.engine.metrics.server_stats import ServerStats, total
from quire.foundation.messages.to_engine import Adapter

logger = logging.getLogger(__name__)

ANSWER_S = 2.0
"""Seconds that an answer is waited for."""
_AGAIN_S = 0.005
_MAX_BYTES = 2**18
"""More than a datagram holds by Linux's default limit: a shorter buffer would cut it off."""
_LIFE_SHIFT = 32


class WriteCounts(msgspec.Struct, frozen=True, tag=True):
    """Asks for a file of what the process has counted; see SharedCounts."""


class CountOpen(msgspec.Struct, frozen=True, tag=True):
    """Asks what the process holds; see EngineSession.counts."""


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    adapter: Adapter


class AdapterUnloaded(msgspec.Struct, frozen=True, tag=True):
    name: str


class EnginesPaused(msgspec.Struct, frozen=True, tag=True):
    """Says that engines were told to pause or to go on; engines that are away have not heard it."""

    action: str


Answer = Mapping[str, int]
Question = WriteCounts | CountOpen | AdapterLoaded | AdapterUnloaded | EnginesPaused


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A datagram: a question, or the answer to the question of this number."""

    sender: int
    number: int
    question: Question | None = None
    answer: dict[str, int] | None = None


class Peers:
    """The way to the other ones of `count` processes, whose sockets are in a directory private to the server.

    By the `life` of this process, late answers to its predecessor are not taken for its own.
    """

    def __init__(self, place: int = 0, count: int = 1, directory: Path = Path(), life: int = 0) -> None:
        self.directory, self.life = directory, life
        self._place = place
        self._others = [other for other in range(count) if other != place]
        self._socket: socket.socket | None = None
        self._lock_file = -1
        self._answering: dict[type[Any], Callable[[Any], Answer | None]] = {}
        self._waiting: dict[tuple[int, int], asyncio.Future[Answer]] = {}  # by place and question
        self._asked = life << _LIFE_SHIFT
        self._told: set[asyncio.Task[Any]] = set()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(_Envelope)

    def on(self, kind: type[Any], answer: Callable[[Any], Answer | None]) -> None:
        """Answer questions of this kind with `answer`, in the event loop. None stands for an empty answer."""
        self._answering[kind] = answer

    def open(self) -> None:
        """Begin to answer; called in the event loop. More calls do nothing."""
        if not self._others or self._socket is not None:
            return
        address = self._address(self._place)
        Path(address).unlink(missing_ok=True)  # of the process before
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(address)
        self._lock_file = os.open(self.directory / "changing", os.O_RDWR | os.O_CREAT, 0o600)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._on_readable)

    def close(self) -> None:
        """Stop answering. More calls do nothing."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        os.close(self._lock_file)

    async def ask(self, question: Question) -> list[Answer]:
        """Ask the others. Returns the answers that come in time."""
        if self._socket is None:
            return []
        self._asked += 1
        number = self._asked
        answers = await asyncio.gather(*(self._ask(other, number, question) for other in self._others))
        return [answer for answer in answers if answer is not None]

    def tell(self, question: Question) -> None:
        """Ask the others without waiting for their answers."""
        if self._socket is None:
            return
        task = asyncio.get_running_loop().create_task(self.ask(question))
        self._told.add(task)
        task.add_done_callback(self._told.discard)

    @property
    def alone(self) -> bool:
        return not self._others

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """A context in which only one task of all processes is at a time. A process that dies leaves it."""
        if self._socket is None:
            yield
            return
        while not _locked(self._lock_file):
            await asyncio.sleep(_AGAIN_S)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # closed meanwhile
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def _address(self, place: int) -> str:
        return str(self.directory / f"api-{place}")

    async def _ask(self, other: int, number: int, question: Question) -> Answer | None:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[other, number] = answer
        try:
            async with asyncio.timeout(ANSWER_S):
                while (sent := self._send(other, _Envelope(self._place, number, question))) is None:
                    await asyncio.sleep(_AGAIN_S)
                return await answer if sent else None
        except TimeoutError:
            logger.warning("API process %d has not answered within %g s.", other, ANSWER_S)
            return None
        finally:
            del self._waiting[other, number]

    def _send(self, other: int, envelope: _Envelope) -> bool | None:
        """Send a datagram. Returns whether it was sent; None if there is no room for it now."""
        if self._socket is None:
            return False
        try:
            self._socket.sendto(self._encoder.encode(envelope), self._address(other))
        except BlockingIOError:
            return None
        except OSError:  # nobody is there
            return False
        return True

    def _on_readable(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(_MAX_BYTES)
            except BlockingIOError:
                return
            self._on_envelope(self._decoder.decode(data))

    def _on_envelope(self, envelope: _Envelope) -> None:
        if envelope.question is not None:
            answer = self._answering[type(envelope.question)](envelope.question)
            self._send(envelope.sender, _Envelope(self._place, envelope.number, answer=dict(answer or {})))
        elif (waiting := self._waiting.get((envelope.sender, envelope.number))) and not waiting.done():
            waiting.set_result(envelope.answer or {})


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class SharedCounts:
    """The counts of all API processes, which /metrics shows whichever process is asked.

    For each scrape every process writes its counts to a file of its own. The file stays when the process ends, so no
    counter goes back while others live.
    """

    def __init__(self, stats: ServerStats, peers: Peers) -> None:
        self._stats = stats
        self._peers = peers
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ServerStats)
        peers.on(WriteCounts, self._write)

    async def total(self) -> ServerStats:
        """Everything that was counted until now. A process that does not answer counts with what it wrote last."""
        if self._peers.alone:
            return self._stats
        lives = {answer["life"] for answer in await self._peers.ask(WriteCounts())}
        self._write()
        alive, gone = [self._stats], list[ServerStats]()
        for path in self._peers.directory.glob("counts-*"):
            life = int(path.name.removeprefix("counts-"))
            if life != self._peers.life:
                (alive if life in lives else gone).append(self._decoder.decode(path.read_bytes()))
        return total(alive, gone)

    def _write(self, question: WriteCounts | None = None) -> Answer:
        """Write down what this process has counted, and answer with its `life`."""
        self._stats.process = read_process()
        name = f"counts-{self._peers.life}"
        written = self._peers.directory / f".{name}"
        written.write_bytes(self._encoder.encode(self._stats))
        written.replace(self._peers.directory / name)
        return {"life": self._peers.life}
