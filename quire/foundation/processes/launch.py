"""What parent and child exchange as JSON: the launch configuration in, reports out (also about another model that takes
the place of the served one), and the exit code at the end.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Literal

import msgspec

from quire.foundation.config import Config
from quire.foundation.messages.from_engine import EngineId

SwapMode = Literal["beside", "after"]
"""Whether the new model is loaded while the old one serves, or after it is gone."""
SwapPhase = Literal["loading", "draining", "stopping", "restoring", "done", "failed"]
"""What a swap waits for: the new model's start, open requests of the old one, the end of its processes, or the old
model's return. `beside` loads first, `after` last."""


class SwapRequest(msgspec.Struct, frozen=True, tag=True):
    """Serve another model, by settings as they were asked for (`asked`, from which the next change starts), and
    resolved (`config`). Open requests of the old model have `drain_timeout` seconds, and new requests wait
    `hold_timeout` seconds while no model serves. `reasons` has a line for each choice, for the log."""

    asked: Config
    config: Config
    mode: SwapMode
    drain_timeout: float
    hold_timeout: float
    reasons: tuple[str, ...] = ()


class ModelReport(msgspec.Struct, frozen=True, tag=True):
    """What has become of a model in the API process, by `state`: `served` takes new requests, `released` has no open
    request and talks to no engine, `refused` cannot be served, and `message` says why."""

    generation: int
    state: Literal["served", "released", "refused"]
    message: str = ""


class SwapStatus(msgspec.Struct, frozen=True):
    """How a swap proceeds: its number from 1, the new model's first name, why it failed, and how long it has taken."""

    number: int
    model: str
    mode: SwapMode
    phase: SwapPhase
    reason: str = ""
    seconds: float | None = None

    @property
    def ended(self) -> bool:
        return self.phase in ("done", "failed")


EXIT_CRASHED = 70
"""Exit code of a process that failed with an unexpected error (EX_SOFTWARE of sysexits.h)."""
EXIT_ORPHANED = 75
"""Exit code of a child whose parent is gone (EX_TEMPFAIL)."""
STOP_ENGINE = signal.SIGUSR1
"""Ends an engine in order. SIGTERM does not: a service manager may send it to all processes at once, and the engine is
still needed until open requests are finished."""
PULSE_S = 1.0
"""Maximum seconds between two pulses of a live process, unless it is busy with one thing."""


class RingEnd(msgspec.Struct, frozen=True, tag=True):
    """One end of a ring of messages between ranks.

    Attributes:
        memory_fd: Inherited descriptor of its shared memory.
        size: Bytes of messages that it holds.
        bells: Inherited eventfds by which readers learn of new messages: a writer has those of all, a reader its own.
        readers: How many readers there are.
        reader: Which of them this is.
    """

    memory_fd: int
    size: int
    bells: list[int]
    readers: int = 1
    reader: int = 0

    @property
    def fds(self) -> list[int]:
        return [self.memory_fd, *self.bells]


class SocketEnd(msgspec.Struct, frozen=True, tag=True):
    """One end of a link to ranks of another machine: inherited blocking connections to each reader, or to the writer,
    for messages of at most `max_bytes`."""

    socket_fds: list[int]
    max_bytes: int

    @property
    def fds(self) -> list[int]:
        return self.socket_fds


LinkEnd = RingEnd | SocketEnd
"""An end of a link to a rank of this machine, or of another."""


class StageEnds(msgspec.Struct, frozen=True):
    """A rank's ends of links to other pipeline stages, None for a link that it does not have: streams from the stage
    before and to the stage after, and sampled tokens to the ranks of the first stage, from one of the last."""

    before: LinkEnd | None = None
    after: LinkEnd | None = None
    tokens_in: LinkEnd | None = None
    tokens_out: LinkEnd | None = None

    @property
    def fds(self) -> list[int]:
        ends = (self.before, self.after, self.tokens_in, self.tokens_out)
        return [fd for end in ends if end is not None for fd in end.fds]


class GroupEnds(msgspec.Struct, frozen=True):
    """An engine's ends of what it shares with others that divide experts with it: inherited descriptors of the memory
    of all ranks of all engines, and of eventfds by which ranks wake one another, engine by engine."""

    engine: int
    memory_fd: int
    bells: list[int]

    @property
    def fds(self) -> list[int]:
        return [self.memory_fd, *self.bells]


class RankLaunch(msgspec.Struct, frozen=True):
    """What a rank of an engine is told beside the engine's settings. Descriptors (`…_fd`) are inherited.

    Attributes:
        first: The first rank of its machine.
        here: How many ranks its machine has.
        socket_fd: For messages to the engine, and a byte in return for each new message in the ring.
        ring_fd: Shared memory with the engine's messages to all ranks.
        memory_fd: Shared memory of the ranks of its stage, for collectives.
        spins: How often a rank looks for another before it sleeps.
        patience_s: Seconds that ranks wait for one another in a step.
        ends_with_parent: Whether the kernel ends it when the thread that started it ends.
        stage: Its ends of links to other stages.
        group: What its engine shares with others; None for nothing.
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
        own = [self.socket_fd, self.ring_fd, self.memory_fd, *self.stage.fds]
        return own if self.group is None else own + self.group.fds


def api_name(place: int, count: int) -> str:
    """The name of the API process with this place among `count`."""
    return "api" if count == 1 else f"api {place}"


class LaunchConfig(msgspec.Struct, frozen=True):
    """Everything that a child is told.

    Attributes:
        config: Resolved settings.
        directory: Private directory of the model's sockets; those of other models lie beside it.
        number: For an API process: its number, which no other life of one has.
        place: For an API process: its place among those that serve together; its successor takes the same place.
        restarts: How often API processes were replaced before this one began.
        created: When the model's engines were first started, in seconds since 1970.
        listen_fd: For an API process: the inherited listening socket.
        developer_mode: Whether debug routes are served.
        engine: For an engine: which one it is.
        engines: For an API process: the engines that it talks to, by their numbers.
        rank: For a rank of an engine.
        group: For an engine: what it shares with others; None for nothing.
        generation: Which model of the server this is about: 0 the first, 1 its successor.
        asked: For an API process: settings as they were asked for, before choices were made.
        takes_orders: Whether the parent gives orders through `orders_fd` while it runs.
        host_memory: For an engine: the path of memory for host blocks that outlives it; empty: it has its own.
        hold_s: For an API process: seconds that requests wait for its model, which is not ready yet.
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
    host_memory: str = ""

    @property
    def api_name(self) -> str:
        """The name of the API process of this place in messages."""
        return api_name(self.place, self.config.server.api_server_count)

    @property
    def inherited_fds(self) -> list[int]:
        """The descriptors that the child inherits, with the same numbers."""
        of_ends = [fd for ends in (self.rank, self.group) if ends is not None for fd in ends.fds]
        return of_ends + [fd for fd in (self.listen_fd, self.orders_fd) if fd >= 0]


class StatusReport(msgspec.Struct, frozen=True, tag=True):
    """How a child's start went, or why it ends.

    state: `ready` once, or `failed` in the last report.
    error: For `failed`: the name of a class in `quire.errors`, or empty for an unexpected error.
    message: For `failed`: cause and next action, in one line.
    startup: For `ready` of an engine: seconds by stage.
    kv_tokens: For `ready` of an API process: tokens that the engine's KV cache holds.
    pools: For `ready` of an API process: the first task of a model that generates no text; empty: it does.
    """

    state: Literal["ready", "failed"]
    error: str = ""
    message: str = ""
    startup: dict[str, float] = {}
    kv_tokens: int = 0
    pools: str = ""


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """A sign that a child is alive. For an engine, `stalled_s` are the seconds since it last finished a step or had
    none to do, and `limit_s` is their maximum."""

    stalled_s: float = 0.0
    limit_s: float = 0.0


class Recovery(msgspec.Struct, frozen=True, tag=True):
    """A report that this many sequences of an API process go on in another engine, of the model of this generation."""

    engine: EngineId
    sequences: int
    generation: int = 0


class NodesPlaced(msgspec.Struct, frozen=True, tag=True):
    """A report that Ray has a place for each node of an engine; with 1 node, all ranks are on this machine. `address`
    is the address of this node for the others."""

    nodes: int
    address: str


Report = StatusReport | Pulse | Recovery | SwapRequest | ModelReport | NodesPlaced
SendReport = Callable[[Report], None]
