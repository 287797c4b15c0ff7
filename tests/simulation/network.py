"""Sockets between simulated processes, as ZMQ's PUSH and PULL behave: one address for each inbox, order within each
connection, and what a dead process had not handed over yet is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tests.simulation.world import World


class Inbox:
    """What has arrived at an address.

    Attributes:
        bound: Whether somebody listens; until then messages wait at their senders.
        on_arrival: Called when something has arrived.
    """

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        self.bound = False
        self.on_arrival: Callable[[], None] = lambda: None


class Connection:
    """One sender's way to one address.

    Args:
        network: Decides how long a message takes.
        owner: Whose it is.
        address: Where it leads.
    """

    def __init__(self, network: Network, owner: object, address: str) -> None:
        self._network = network
        self.owner = owner
        self.address = address
        self._on_the_way: deque[bytes] = deque()
        self._last_arrival = 0.0
        self._closed = self._held = False

    @property
    def num_on_the_way(self) -> int:
        """Messages that have not arrived."""
        return len(self._on_the_way)

    def peek(self, place: int) -> bytes:
        """A message on the way, the next one first."""
        return self._on_the_way[place]

    def replace(self, place: int, message: bytes) -> None:
        """Another message arrives in its place."""
        self._on_the_way[place] = message

    def send(self, message: bytes) -> None:
        """Hand a message over; never waits."""
        if self._closed:
            return
        world = self._network.world
        self._on_the_way.append(message)
        # Not before what was sent earlier; the world draws lots for what happens at the same time.
        self._last_arrival = max(world.now() + self._network.latency(), self._last_arrival)
        world.at(self._last_arrival, self.deliver)

    def deliver(self) -> None:
        """The next message arrives, if somebody listens."""
        inbox = self._network.inbox(self.address)
        if self._on_the_way and inbox.bound and not self._held:
            inbox.messages.append(self._on_the_way.popleft())
            inbox.on_arrival()

    def deliver_all(self) -> None:
        """Somebody listens now: what has waited arrives in order."""
        for _ in range(len(self._on_the_way)):
            self._network.world.at(self._last_arrival, self.deliver)

    def close(self) -> None:
        """No more is sent; what is on the way arrives."""
        self._closed = True

    def cut(self, kept: int) -> None:
        """Its owner is dead: only the first `kept` messages on the way arrive."""
        self._closed = True
        while len(self._on_the_way) > kept:
            self._on_the_way.pop()

    def hold_back(self) -> None:
        """What is on the way does not arrive before `let_go`."""
        self._held = True

    def let_go(self) -> None:
        """What was held back arrives."""
        self._held = False
        self.deliver_all()


class Network:
    """All inboxes and connections.

    Args:
        world: Gives the time.

    Attributes:
        slowness: Factor of how long messages take.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.slowness = 1.0
        self._random = world.random("network")
        self._inboxes: dict[str, Inbox] = {}
        self._connections: list[Connection] = []
        self._late: list[Connection] = []

    def latency(self) -> float:
        """Seconds that a message takes: mostly next to nothing."""
        return self.slowness * self._random.choice((2e-5, 2e-5, 1e-4, 1e-4, 1e-3, 1e-2))

    def inbox(self, address: str) -> Inbox:
        """What is there, whether or not anybody listens yet."""
        return self._inboxes.setdefault(address, Inbox())

    def bind(self, address: str, on_arrival: Callable[[], None]) -> Inbox:
        """Listen."""
        inbox = self.inbox(address)
        inbox.bound, inbox.on_arrival = True, on_arrival
        for connection in self._connections:
            if connection.address == address:
                connection.deliver_all()
        return inbox

    def connect(self, owner: object, address: str) -> Connection:
        """A way to an address, of a process."""
        connection = Connection(self, owner, address)
        self._connections.append(connection)
        return connection

    def connections(self) -> list[Connection]:
        """Those that are not closed."""
        return list(self._connections)

    def forget(self, connection: Connection) -> None:
        """Nothing comes from it any more, and what was on its way is lost."""
        connection.cut(0)
        if connection in self._connections:
            self._connections.remove(connection)

    def drop(self, owner: object) -> None:
        """A process is dead. Of what it had on the way some arrives, perhaps late; the rest does not."""
        for connection in [each for each in self._connections if each.owner is owner]:
            most = connection.num_on_the_way
            connection.cut(self._random.choice((most, self._random.randint(0, most))))
            self._connections.remove(connection)
            self._delay(connection)

    def is_quiet(self, address: str) -> bool:
        """Whether nothing is on its way to an address, or there and not taken."""
        waiting = any(each.num_on_the_way for each in self._connections if each.address == address)
        return not waiting and not self.inbox(address).messages

    def engine_is_ready(self) -> None:
        """What an earlier one has said arrives now, at the worst moment."""
        late, self._late = self._late, []
        for connection in late:
            self.world.after(self._random.uniform(0.0, 0.1), connection.let_go)

    def _delay(self, connection: Connection) -> None:
        """Hold back what a dead process has said, so that it comes after what is said about its death."""
        until = self._random.choice(("now", "soon", "the next engine is ready"))
        if until != "now" and connection.num_on_the_way:
            connection.hold_back()
            if until == "soon":
                self.world.after(self._random.uniform(0.0, 3.0), connection.let_go)
            else:
                self._late.append(connection)
