"""A node that is not the head: starts its ranks for each engine of the head, and passes on what engine and ranks say.

The node outlives engines: when one dies, or the way to it breaks, the node ends its ranks and joins the next. It ends
when the head ends in order, refuses it, or is gone for too long.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import FrameType

import msgspec

from quire.compute.mesh import mesh_of
from quire.errors import ConfigError, EngineDeadError, SetupError
from quire.foundation.clock import Clock
from quire.foundation.config import Config, environment
from quire.runtime.executor.nodes.connection import Connection, ConnectionLostError
from quire.runtime.executor.nodes.gate import Gate, WrongKeyError
from quire.runtime.executor.nodes.head_ranks import ranks_with_links
from quire.runtime.executor.nodes.link_setup import LinkSetup, connect
from quire.runtime.executor.nodes.node_messages import (
    End,
    Failed,
    ForRanks,
    Join,
    Launch,
    Refused,
    Said,
    Started,
    ToNode,
)
from quire.runtime.executor.nodes.roll_call import model_fingerprint, shape_of
from quire.runtime.executor.rank_processes import STOP_TIMEOUT_S, RankProcesses
from quire.version import __version__

FIRST_PATIENCE_S = 3600.0
"""How long a node waits for a head that it has not heard of yet."""
HEAD_PATIENCE_S = 300.0
"""How long a node waits for the head's next engine."""
_AGAIN_S = 0.5
_LOOK_S = 0.5


class _Stopped(Exception):
    """A signal asks the node to end."""


class Follower:
    """Runs this node's ranks for one engine of the head after another; `say` prints a line of the log."""

    def __init__(self, config: Config, clock: Clock, say: Callable[[str], None]) -> None:
        self._config = config
        self._clock = clock
        self._say = say
        self._key = environment.node_key(config.parallel.node_key_file)
        self._head = config.parallel.master_addr, config.parallel.master_port
        self._at = f"{self._head[0]}:{self._head[1]}"
        self._model = model_fingerprint(config.model.model)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)
        self._asked = config.parallel.distributed_timeout_seconds
        self._patience_s = float(self._asked or FIRST_PATIENCE_S)
        self._waits_since = clock.now()
        self._said = ""

    def run(self) -> int:
        """Run until the head has ended; returns the exit code.

        Raises:
            ConfigError: The head refuses this node.
            EngineDeadError: The head is gone.
        """
        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGINT, _stop)
        with suppress(_Stopped):
            self._say(f"Node {self._config.parallel.node_rank} joins the head at {self._at}")
            while not self._follow_one_engine():
                time.sleep(_AGAIN_S)
            self._say("The head has ended; so does this node.")
        return 0

    def _follow_one_engine(self) -> bool:
        """Join the head and serve one of its engines; returns whether the head has ended in order."""
        connection, gate = self._join()
        with gate:
            try:
                launch = self._wait_for_launch(connection)
                self._say("All nodes have joined: an engine starts")
                ranks = self._start(launch, connection, gate)
            except ConnectionLostError as error:
                self._lost(connection, error.message)
                return False
            except (SetupError, EngineDeadError) as error:
                self._failed(connection, error)
                return False
        return self._serve(connection, ranks)

    def _join(self) -> tuple[Connection, Gate]:
        """Connect to the head, and listen for other nodes; the head learns of both."""
        while True:
            try:
                return self._join_once()
            except WrongKeyError as error:
                raise ConfigError(
                    f"The head at {self._at} was not joined: {error.message}. Give all nodes the same key.",
                    param="node_key_file",
                ) from error
            except (OSError, ConnectionLostError) as error:
                why = str(getattr(error, "message", error))
            self._say_once(f"The head at {self._at} cannot be joined yet: {why}")
            if self._clock.now() - self._waits_since > self._patience_s:
                raise EngineDeadError(
                    f"The head at {self._at} was not reached for {self._patience_s:g} s: {why}. Start it there with "
                    "--node-rank 0, see whether a firewall lets this machine through, or give it more time by "
                    "--distributed-timeout-seconds."
                )
            time.sleep(_AGAIN_S)

    def _join_once(self) -> tuple[Connection, Gate]:
        connected = connect(self._head, self._key)
        gate = Gate(connected.getsockname()[0], 0, self._key)
        parallel = self._config.parallel
        connection = Connection(connected)
        host = socket.gethostname()
        join = Join(__version__, parallel.node_rank, shape_of(parallel), self._model, host, gate.port)
        try:
            connection.post(self._encoder.encode(join))
        except ConnectionLostError:
            gate.close()
            connection.close()
            raise
        return connection, gate

    def _wait_for_launch(self, connection: Connection) -> Launch:
        """Wait until the head says that all nodes are there.

        Raises:
            ConnectionLostError: The head is gone, or does not take this node now.
            ConfigError: The head will never take this node.
        """
        with selectors.EpollSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            while True:
                selector.select()
                for encoded in connection.take():
                    match self._decoder.decode(encoded):
                        case Launch() as launch:
                            self._patience_s = float(self._asked or HEAD_PATIENCE_S)
                            return launch
                        case Refused(message, is_final):
                            if is_final:
                                connection.close()
                                raise RefusedError(f"The head at {self._at} refuses this node: {message}.")
                            raise ConnectionLostError(message)
                        case other:
                            raise ConnectionLostError(f"{type(other).__name__} came before a start")

    def _start(self, launch: Launch, connection: Connection, gate: Gate) -> RankProcesses:
        config = self._own(launch.config)
        parallel = config.parallel
        addresses = [self._head, *launch.addresses[1:]]
        setup = LinkSetup(mesh_of(parallel), parallel.node_rank, parallel.nodes, launch.session, addresses, self._key)

        def check() -> None:
            if connection.take():
                raise ConnectionLostError("a message came before the start was over")

        return ranks_with_links(config, self._clock, setup.open(gate, check))

    def _own(self, heads: Config) -> Config:
        """The head's settings, with this machine's own: where files lie, and how much fits into its memory."""
        own = self._config
        model = replace(
            heads.model, model=own.model.model, tokenizer=own.model.tokenizer, gguf_file=own.model.gguf_file,
            hf_token=own.model.hf_token,
        )  # fmt: skip
        blocks = [b for b in (heads.cache.num_gpu_blocks_override, own.cache.num_gpu_blocks_override) if b is not None]
        states = [n for n in (heads.cache.num_states_override, own.cache.num_states_override) if n is not None]
        sizes = [size for size in (heads.cache.kv_offloading_size, own.cache.kv_offloading_size) if size is not None]
        cache = replace(
            heads.cache,
            num_gpu_blocks_override=min(blocks, default=None),
            num_states_override=min(states, default=None),
            swap_space=min(heads.cache.swap_space, own.cache.swap_space),
            kv_offloading_size=min(sizes, default=None),
        )
        device = replace(heads.device, cpu_threads=own.device.cpu_threads)
        return replace(
            heads, model=model, cache=cache, device=device, parallel=own.parallel, load=own.load, server=own.server,
            observability=own.observability,
        )  # fmt: skip

    def _serve(self, connection: Connection, ranks: RankProcesses) -> bool:
        """Serve one engine for its whole life; returns whether the head has ended in order."""
        self._said = ""
        try:
            connection.post(self._encoder.encode(Started(ranks.pids)))
            self._say(f"This node computes; its ranks are processes {', '.join(map(str, ranks.pids))}")
            ended = self._hand_on(connection, ranks)
        except ConnectionLostError as error:
            ranks.close(at_once=True)
            self._lost(connection, error.message)
            return False
        except (SetupError, EngineDeadError) as error:
            ranks.close(at_once=True)
            self._failed(connection, error)
            return False
        except _Stopped:
            ranks.close(at_once=True)
            connection.close()
            raise
        finally:
            self._waits_since = self._clock.now()
        ranks.close(at_once=False)
        connection.close()
        return ended

    def _hand_on(self, connection: Connection, ranks: RankProcesses) -> bool:
        """Pass on what the engine says to the ranks, and what they say to it, until its End."""
        with selectors.EpollSelector() as selector:
            selector.register(ranks, selectors.EVENT_READ, ranks)
            selector.register(connection, selectors.EVENT_READ, connection)
            while True:
                events = selectors.EVENT_READ | selectors.EVENT_WRITE * connection.has_unsent
                selector.modify(connection, events, connection)
                ready = {key.data: events for key, events in selector.select(_LOOK_S)}
                connection.flush()
                readable = ready.get(connection, 0) & selectors.EVENT_READ
                for encoded in connection.take() if readable else []:
                    match self._decoder.decode(encoded):
                        case ForRanks(message):
                            ranks.broadcast_encoded(message)
                        case End():
                            return True
                        case other:
                            raise ConnectionLostError(f"{type(other).__name__} came after the start")
                for rank, said in ranks.receive(0.0):
                    connection.post(self._encoder.encode(Said(rank, self._encoder.encode(said))))

    def _lost(self, connection: Connection, why: str) -> None:
        connection.close()
        self._say_once(f"The head's engine is lost, and this node waits for the next one: {why}")

    def _say_once(self, line: str) -> None:
        if line != self._said:
            self._say(line)
        self._said = line

    def _failed(self, connection: Connection, error: SetupError | EngineDeadError) -> None:
        """Tell the head what has failed here."""
        if isinstance(error, RefusedError):
            raise error
        where = f"Node {self._config.parallel.node_rank} ({socket.gethostname()}): "
        is_setup = isinstance(error, SetupError)
        failed = Failed(type(error).__name__ if is_setup else "", where * is_setup + error.message)
        with suppress(ConnectionLostError):
            connection.post(self._encoder.encode(failed))
        self._say(f"This node's ranks have failed: {error.message}")
        connection.close(STOP_TIMEOUT_S)


class RefusedError(ConfigError):
    """The head does not take this node, ever."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped
