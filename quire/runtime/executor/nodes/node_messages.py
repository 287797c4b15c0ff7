"""What the nodes of one engine say to one another, as msgpack, once they know that they have the same key."""

from __future__ import annotations

import msgspec

from quire.foundation.config import Config


class Join(msgspec.Struct, frozen=True, tag=True):
    """The first message of a node to the head.

    Attributes:
        version: The version of Quire.
        node: The node's number.
        shape: Its --nnodes, --tensor-parallel-size, --pipeline-parallel-size and --enable-expert-parallel, as text.
        model: The `model_fingerprint` of its model's files.
        host: The machine's name, for messages.
        port: The port where it listens for links, at the address from which it has connected.
    """

    version: str
    node: int
    shape: str
    model: str
    host: str
    port: int


class LinkJoin(msgspec.Struct, frozen=True, tag=True):
    """The first message of a connection that is a link between two ranks of the engine with this session."""

    session: str
    kind: str
    sender: int
    receiver: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The head does not take the node.

    Attributes:
        message: Why, and what to do.
        is_final: Whether other attempts will be refused too.
    """

    message: str
    is_final: bool


class Launch(msgspec.Struct, frozen=True, tag=True):
    """All nodes are there: start your ranks.

    Attributes:
        config: The head's settings, resolved, without secrets.
        session: This engine's.
        addresses: Where each node listens for links, by its number; all nodes know the head's.
    """

    config: Config
    session: str
    addresses: list[tuple[str, int]]


class ForRanks(msgspec.Struct, frozen=True, tag=True):
    """A message for the node's ranks, as they read it (`ToRanks`)."""

    message: bytes


class End(msgspec.Struct, frozen=True, tag=True):
    """The server ends in order: after Stop, the node's ranks and the node end too."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """A node has started its ranks: their process ids, in their order."""

    pids: list[int]


class Said(msgspec.Struct, frozen=True, tag=True):
    """What a rank has said (`FromRank`)."""

    rank: int
    message: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A node's ranks have failed.

    Attributes:
        error: The class in `quire.errors`, if a start has failed; empty: a rank is gone.
        message: Which rank failed, and why.
    """

    error: str
    message: str


FromStranger = Join | LinkJoin
"""What may come first."""
ToNode = Refused | Launch | ForRanks | End
FromNode = Started | Said | Failed
