"""Hours of mixed traffic: whether anything grows or is left behind.

    python -m benchmarks.soak --minutes 60 [flags of quire serve]

Streams, aborted ones, structured output in more grammars than are kept, tools, wrong requests, choices, log
probabilities, long prompts, beam search, embeddings, ranks, the other APIs. Every few seconds the memory, file
descriptors and threads of each process are noted. The verdict: behind the first quarter no process has grown by more
than 1% (5% in less than half an hour, when caches and pools still fill), every answer was one that there should have
been, and afterwards nothing is held that was not held before.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak_traffic import SoakTraffic
from tests.e2e.process_usage import PROMPT_MALLOC, Usage, usage
from tests.e2e.serve import QuireServe

CLIENTS = 8
WARM_UP_S = 15.0
"""Before it is noted what an idle server holds: processes and threads start with the first request that needs them."""
SLACK = 8
"""File descriptors and threads that a process may have more than after the warm-up: pools grow up to their bounds."""
SERVING = ("supervisor", "api", "engine")
"""Processes that live as long as the server does. Others are helpers, which end when they have nothing to do."""
LONG_MINUTES, GROWTH, SHORT_GROWTH = 30.0, 0.01, 0.05
FLAGS = (
    "--port", "0", "--num-gpu-blocks-override", "1024", "--max-num-seqs", "32", "--max-queue-time", "600",
    "--disable-uvicorn-access-log", "--runner", "generate", "--pooler-config", '{"pooling_type": "LAST"}',
)  # fmt: skip
"""Text and vectors of one model. A small KV cache, whose memory has all been used soon: what is never written to takes
no memory. Nobody is turned away, however slow the machine."""


@dataclass
class Samples:
    """What each process took, and when.

    Attributes:
        times: Minutes since the beginning of the traffic.
        usages: At these times, by process.
    """

    times: list[float] = field(default_factory=list)
    usages: list[dict[str, Usage]] = field(default_factory=list)

    def growth(self, name: str, since: float) -> float:
        """By what share a process's memory has grown since so many minutes: from the first fifth of that time to the
        last, which lie four fifths of it apart.

        Of each the lower quartile counts: a long prompt's log probabilities take 50 MiB for a moment, while what is
        kept is there in every sample.
        """
        samples = zip(self.times, self.usages, strict=True)
        rss = [sample[name].rss for at, sample in samples if at >= since and name in sample]
        fifth = max(1, len(rss) // 5)
        first, last = (sorted(some)[len(some) // 4] for some in (rss[:fifth], rss[-fifth:]))
        return (last / first - 1) / 0.8

    def lived(self, name: str, since: float) -> bool:
        """Whether the same processes had this name all the time since so many minutes."""
        samples = zip(self.times, self.usages, strict=True)
        return len({sample.get(name, Usage()).pids for at, sample in samples if at >= since}) == 1

    def row(self) -> str:
        """The last sample, in a line."""
        parts = [
            f"{name} {one.rss / 2**20:.1f} MiB {one.fds} fds {one.threads} threads"
            for name, one in sorted(self.usages[-1].items())
        ]
        return f"{self.times[-1]:6.1f} min: " + "; ".join(parts)


class Soak:
    """A server under traffic.

    Args:
        server: Ready, in developer mode.
        minutes: Of traffic.
        seed: Of the traffic.

    Attributes:
        complaints: What is wrong; empty if nothing is.
    """

    def __init__(self, server: QuireServe, minutes: float, seed: int = 0) -> None:
        self._server = server
        self._minutes = minutes
        self._traffic = SoakTraffic(server.url, CLIENTS, seed)
        self._samples = Samples()
        self.complaints: list[str] = []

    async def run(self) -> None:
        """All of it; shows how it goes."""
        await self._traffic.fill()
        await self._ask_for(WARM_UP_S)
        counts, held = await self._idle(), usage(self._server.process.pid)
        sampling = asyncio.create_task(self._sample())
        await self._ask_for(60 * self._minutes)
        sampling.cancel()
        print(dict(sorted(self._traffic.answers.items())))
        self.complaints += self._traffic.complaints
        self._judge_growth(held)
        self._judge_leaks(counts, held, await self._idle())

    async def _ask_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        await self._traffic.run(lambda: time.monotonic() > end)

    async def _sample(self) -> None:
        samples, begin, shown = self._samples, time.monotonic(), 0.0
        every = max(1.0, self._minutes / 6)
        while True:
            samples.times.append((time.monotonic() - begin) / 60)
            samples.usages.append(usage(self._server.process.pid))
            if samples.times[-1] >= shown:
                print(samples.row(), flush=True)
                shown += max(0.5, self._minutes / 20)
            await asyncio.sleep(every)

    async def _idle(self) -> dict[str, Any]:
        """What is held once nothing is open any more, or after a while in any case."""
        deadline = time.monotonic() + 20
        while True:
            await asyncio.sleep(0.3)
            counts = await asyncio.to_thread(self._server.counts)
            api, engine = counts["api"], counts["engine"]
            if not (api["sequences"] or engine["requests"]) or time.monotonic() > deadline:
                await asyncio.sleep(1.0)  # connections close behind their last request
                return await asyncio.to_thread(self._server.counts)

    def _judge_growth(self, held: dict[str, Usage]) -> None:
        limit = GROWTH if self._minutes >= LONG_MINUTES else SHORT_GROWTH
        since = self._minutes / (4 if self._minutes >= LONG_MINUTES else 3)
        for name in sorted(held):
            if name not in SERVING and not self._samples.lived(name, since):
                print(f"{name}: ended or was replaced meanwhile, so nothing that it may have kept is left")
                continue
            growth = self._samples.growth(name, since)
            print(f"{name}: memory grew by {growth:+.2%} over the last {self._minutes - since:.0f} minutes")
            if growth >= limit:
                self.complaints.append(f"{name} has grown by {growth:.2%}")

    def _judge_leaks(self, before: dict[str, Any], held: dict[str, Usage], after: dict[str, Any]) -> None:
        engine, api = after["engine"], after["api"]
        if engine["free_blocks"] < engine["blocks"] or engine["free_slots"] < engine["slots"] or engine["requests"]:
            self.complaints.append(f"the engine holds something: {engine}")
        if api["sequences"] or api["streams"] or api["tasks"] > before["api"]["tasks"]:
            self.complaints.append(f"the API process holds something: {api}, before {before['api']}")
        now_held = usage(self._server.process.pid)
        for name, then in held.items():
            now = now_held.get(name, Usage())
            more = max(1.0, now.processes / then.processes)  # helper processes
            if now.fds > more * then.fds + SLACK or now.threads > more * then.threads + SLACK:
                self.complaints.append(f"{name} holds descriptors or threads: {now}, before {then}")


def soak(minutes: float, *flags: str, seed: int = 0) -> list[str]:
    """What is wrong with a server after so many minutes; nothing if it is as it was."""
    environment = {"QUIRE_SERVER_DEV_MODE": "1", **PROMPT_MALLOC}
    with QuireServe(*FLAGS, *flags, environment=environment) as server:
        run = Soak(server.wait_ready(), minutes, seed)
        asyncio.run(run.run())
        server.signal()
        code = server.wait(60)
        return run.complaints + [f"exit code {code}"] * (code != 0)


def main() -> int:
    """From the command line; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments, flags = parser.parse_known_args()
    complaints = soak(arguments.minutes, *flags, seed=arguments.seed)
    print("\n".join(complaints) or "nothing grew and nothing is left behind")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
