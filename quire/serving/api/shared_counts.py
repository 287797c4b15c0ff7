"""What /metrics shows: what the API processes of the server have counted together, whichever is asked.

For each scrape every process writes what it has counted to a file of its own, which stays when the process ends: so no
counter goes back while others live. Knows nothing about Prometheus' names.
"""

from __future__ import annotations

import msgspec

from quire.engine.metrics.prometheus import read_process
from quire.engine.metrics.server_stats import ServerStats, total
from quire.serving.api.peers import Answer, Peers, WriteCounts


class SharedCounts:
    """The counts of all API processes.

    Args:
        stats: What this one counts.
        peers: The others.
    """

    def __init__(self, stats: ServerStats, peers: Peers) -> None:
        self._stats = stats
        self._peers = peers
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ServerStats)
        peers.on(WriteCounts, self._write)

    async def total(self) -> ServerStats:
        """All that was counted until now. Of a process that does not answer, what it wrote down last."""
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
        """Write down what this process has counted. Says which life of a process it is."""
        self._stats.process = read_process()
        name = f"counts-{self._peers.life}"
        written = self._peers.directory / f".{name}"
        written.write_bytes(self._encoder.encode(self._stats))
        written.replace(self._peers.directory / name)
        return {"life": self._peers.life}
