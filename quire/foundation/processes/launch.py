"""What parent and child exchange: the launch configuration in, reports out, and the exit code at the end.

Plain data for msgspec, sent as JSON. Knows nothing about pipes or processes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Literal

import msgspec

from quire.foundation.config import Config
from quire.foundation.messages.from_engine import EngineId
from quire.foundation.processes.swap_reports import ModelReport, SwapRequest

EXIT_CRASHED = 70
"""Exit code of a process that failed with an unexpected error (EX_SOFTWARE of sysexits.h)."""
EXIT_ORPHANED = 75
"""Exit code of a child whose parent is gone (EX_TEMPFAIL)."""
STOP_ENGINE = signal.SIGUSR1
"""Ends an engine in order. Not SIGTERM: a service manager may send that to all processes at once, and the engine is
still needed until open requests are finished."""
PULSE_S = 1.0
"""Longest time between two pulses of a live process that is not busy with one thing."""


class RingEnd(msgspec.Struct, frozen=True, tag=True):
    """An end of a ring of messages between ranks. Numbers are of inherited descriptors.

    Attributes:
        memory_fd: Its shared memory.
        size: Bytes of messages that it holds.
        bells: Eventfds by which readers learn that there is more: of all for who writes, its own for who reads.
        readers: How many there are.
        reader: Which of them this is.
    """

    memory_fd: int
    size: int
    bells: list[int]
    readers: int = 1
    reader: int = 0

    @property
    def fds(self) -> list[int]:
        """All descriptors."""
        return [self.memory_fd, *self.bells]


class SocketEnd(msgspec.Struct, frozen=True, tag=True):
    """An end of a link to ranks of another machine.

    Attributes:
        socket_fds: Inherited connections that block: to each reader, or to the one that writes.
        max_bytes: Of a message.
    """

    socket_fds: list[int]
    max_bytes: int

    @property
    def fds(self) -> list[int]:
        """All descriptors."""
        return self.socket_fds


LinkEnd = RingEnd | SocketEnd
"""To a rank of this machine, or of another one."""


class StageEnds(msgspec.Struct, frozen=True):
    """A rank's ends of what leads to other pipeline stages; None: it has none.

    Attributes:
        before, after: Streams from the stage before its own, and to the one after.
        tokens_in, tokens_out: What was sampled: to the ranks of the first stage, from one of the last.
    """

    before: LinkEnd | None = None
    after: LinkEnd | None = None
    tokens_in: LinkEnd | None = None
    tokens_out: LinkEnd | None = None

    @property
    def fds(self) -> list[int]:
        """All descriptors."""
        ends = (self.before, self.after, self.tokens_in, self.tokens_out)
        return [fd for end in ends if end is not None for fd in end.fds]


class GroupEnds(msgspec.Struct, frozen=True):
    """An engine's ends of what it shares with others that divide experts with it. Numbers are of inherited descriptors.

    Attributes:
        engine: Which of them it is.
        memory_fd: Shared memory of all ranks of all engines.
        bells: Eventfds by which ranks wake one another, engine by engine.
    """

    engine: int
    memory_fd: int
    bells: list[int]

    @property
    def fds(self) -> list[int]:
        """All descriptors."""
        return [self.memory_fd, *self.bells]


class RankLaunch(msgspec.Struct, frozen=True):
    """What a rank of an engine is told beside the engine's settings. Numbers `…_fd` are of inherited descriptors.

    Attributes:
        rank: Its number.
        first: The number of the first rank of its machine.
        here: How many ranks its machine has.
        socket_fd: Its messages to the engine, and a byte in return for whatever is new in the ring.
        ring_fd: Shared memory with the engine's messages to all ranks.
        memory_fd: Shared memory of the ranks of its stage, for collectives.
        spins: How often a rank looks for another before it sleeps.
        patience_s: How long ranks wait for one another in a step.
        ends_with_parent: Whether the kernel is to end it when the thread that started it ends.
        stage: Its ends of what leads to other stages.
        group: What its engine shares with others; None: nothing.
    """

    rank: int
    first: int
    here: int
    socket_fd: int
    ring_fd: int
    memory_fd: int
    spins: int
    patience_s: float
    ends_with_parent: bool
    stage: StageEnds = StageEnds()
    group: GroupEnds | None = None

    @property
    def fds(self) -> list[int]:
        """All descriptors."""
        own = [self.socket_fd, self.ring_fd, self.memory_fd, *self.stage.fds]
        return own if self.group is None else own + self.group.fds


def api_name(place: int, count: int) -> str:
    """What an API process is called that has this place among `count`."""
    return "api" if count == 1 else f"api {place}"


class LaunchConfig(msgspec.Struct, frozen=True):
    """Everything a child is told.

    Attributes:
        config: Resolved settings.
        directory: Private directory of the model's sockets; those of other models lie beside it.
        number: Which life of which API process this is, unlike all others; 0 for the engine.
        place: Which of the API processes that serve together it is; its successor takes the same place.
        restarts: How often API processes were replaced before this one began.
        created: When the model's engines were first started, in seconds since 1970.
        listen_fd: Inherited listening socket, for API processes.
        developer_mode: Serve debug routes.
        engine: Which engine this is.
        engines: Those that an API process talks to, by their numbers.
        rank: For a rank of an engine.
        group: For an engine: what it shares with others; None: nothing.
        generation: Which model of the server this is about: 0 the first, 1 what took its place.
        asked: For an API process: settings as they were asked for, before choices were made.
        takes_orders: Whether the parent says more while it runs; then `orders_fd` is where.
        hold_s: For an API process: how long requests wait for its model, which is not ready yet, in seconds.
    """

    config: Config
    directory: str
    number: int = 0
    place: int = 0
    restarts: int = 0
    created: int = 0
    listen_fd: int = -1
    developer_mode: bool = False
    engine: EngineId = EngineId()
    engines: tuple[EngineId, ...] = (EngineId(),)
    rank: RankLaunch | None = None
    group: GroupEnds | None = None
    generation: int = 0
    asked: Config | None = None
    takes_orders: bool = False
    orders_fd: int = -1
    hold_s: float = 0.0

    @property
    def api_name(self) -> str:
        """What an API process of this place is called in messages."""
        return api_name(self.place, self.config.server.api_server_count)

    @property
    def inherited_fds(self) -> list[int]:
        """Descriptors that the child has by the same numbers."""
        of_ends = [fd for ends in (self.rank, self.group) if ends is not None for fd in ends.fds]
        return of_ends + [fd for fd in (self.listen_fd, self.orders_fd) if fd >= 0]


class StatusReport(msgspec.Struct, frozen=True, tag=True):
    """How a child's start went, or why it ends.

    Attributes:
        state: `ready` once; `failed` as the last report.
        error: For `failed`: the class name in `quire.errors`, or empty for an unexpected error.
        message: For `failed`: cause and next action, in one line.
        startup: For the engine's `ready`: seconds by stage.
        kv_tokens: For an API process's `ready`: tokens that the engine's KV cache holds.
    """

    state: Literal["ready", "failed"]
    error: str = ""
    message: str = ""
    startup: dict[str, float] = {}
    kv_tokens: int = 0


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """A child is alive.

    Attributes:
        stalled_s: For an engine: seconds since it last finished a step or had none to do.
        limit_s: How long that may last.
    """

    stalled_s: float = 0.0
    limit_s: float = 0.0


class Recovery(msgspec.Struct, frozen=True, tag=True):
    """The requests of an API process go on in another engine.

    Attributes:
        engine: The one that took over.
        sequences: How many go on with it.
        generation: Of the engine's model.
    """

    engine: EngineId
    sequences: int
    generation: int = 0


class NodesPlaced(msgspec.Struct, frozen=True, tag=True):
    """Ray has a place for each node of an engine.

    Attributes:
        nodes: How many there are; 1: all ranks are on this machine.
        address: Of this one, at which the others reach it.
    """

    nodes: int
    address: str


Report = StatusReport | Pulse | Recovery | SwapRequest | ModelReport | NodesPlaced
SendReport = Callable[[Report], None]
