"""Recovery of a real server from engine failures under streams: how long it takes, and that no token is lost.

    python -m benchmarks.recovery [MODEL] [flags of quire serve]

64 greedy streams; the engine is killed, and on a GPU given a CUDA error, in the middle. Every stream must bring exactly
its number of tokens, each with its place in the text. In bfloat16 the outputs may differ from an undisturbed run behind
the failure, since a prompt is rounded otherwise than single tokens; how many do is printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.faults.engine import FAULT_FILE
from tests.e2e.serve import QuireServe

STREAMS, TOKENS = 64, 600


class Stream:
    """What one client got: the ids of its tokens, and how many it had when the engine failed."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.had = 0
        self.error = ""
        self.longest_pause = 0.0

    async def read(self, client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
        last = time.monotonic()
        async with client.stream("POST", url + "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.error = event["error"]["message"]
                    return
                now = time.monotonic()
                if self.tokens:
                    self.longest_pause = max(self.longest_pause, now - last)
                last = now
                self.tokens += (event["choices"][0].get("logprobs") or {"tokens": []})["tokens"]


async def run(url: str, disturb: Callable[[], None] | None) -> list[Stream]:
    streams = [Stream() for _ in range(STREAMS)]
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        reading = [
            asyncio.create_task(stream.read(client, url, {
                "prompt": f"Story number {i}: once upon a time", "max_tokens": TOKENS, "temperature": 0,
                "ignore_eos": True, "stream": True, "logprobs": 0, "return_tokens_as_token_ids": True,
            }))
            for i, stream in enumerate(streams)
        ]  # fmt: skip
        if disturb is not None:
            while min(len(stream.tokens) for stream in streams) < TOKENS // 4:
                await asyncio.sleep(0.01)
            for stream in streams:
                stream.had = len(stream.tokens)
            await asyncio.to_thread(disturb)
        await asyncio.gather(*reading)
    return streams


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        fault_file = Path(directory) / "fault"
        environment = {FAULT_FILE: str(fault_file)}
        command = ("tests.e2e.faults.serve",)
        with QuireServe(*sys.argv[1:], "--port", "0", environment=environment, command=command) as server:
            server.wait_ready()
            print(re.search(r"Ready in .*", server.log)[0])  # type: ignore[index]
            undisturbed = asyncio.run(run(server.url, None))
            faults: dict[str, Callable[[], None]] = {
                "SIGKILL": lambda: os.kill(server.children()["engine"], signal.SIGKILL)
            }
            if "device      CPU" not in server.log:
                faults["CUDA error"] = lambda: fault_file.write_text("cuda") and None
            failed = 0
            for name, disturb in faults.items():
                began = len(server.log.splitlines())
                streams = asyncio.run(run(server.url, disturb))
                failed += report(name, streams, undisturbed)
                print("  ", *re.findall(r"recovered in .*", "\n".join(server.log.splitlines()[began:])))
            server.signal()
            print("exit code", server.wait(60))
    return failed


def report(name: str, streams: list[Stream], undisturbed: list[Stream]) -> int:
    """Print what became of the streams; how many failed."""
    failed = [stream for stream in streams if stream.error or len(stream.tokens) != TOKENS]
    prefixes = sum(s.tokens[: s.had] == u.tokens[: s.had] for s, u in zip(streams, undisturbed, strict=True))
    same = sum(s.tokens == u.tokens for s, u in zip(streams, undisturbed, strict=True))
    pause = max(stream.longest_pause for stream in streams)
    print(
        f"{name}: {len(failed)} of {len(streams)} failed; longest pause {pause:.2f} s; as undisturbed: {prefixes} up to"
    )
    print(f"   the failure, {same} to the end", *(f"({len(s.tokens)} tokens, {s.error})" for s in failed[:3]))
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
