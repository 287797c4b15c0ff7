"""What structured outputs cost: tokens a second under 64 JSON schemas, and how long their arrival holds up others.

    python tekken.py …                                     # writes DIR, see there
    python structured_output.py --model DIR [--parts tokens,stalls] [--streams N] [--runs N] [--set NAME=VALUE]

Random weights, temperature 1. One JSON line a figure. `tokens`: offline; `streams` sequences run at a time, each with a
schema of its own, and then the same numbers of tokens without one, in turn. `stalls`: `streams` requests with new
schemas come at once to a server with half as many other streams; then as many without schemas, for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offline import setting
from schemas import Schema, schema
from serving import Server, serve, vocabulary

from quire import LLM, SamplingParams
from quire.sampling_params import StructuredOutputsParams
from quire.tools.bench.client import OK, Connections, Outcome, StreamingClient
from quire.tools.bench.datasets import Sample

PROMPT = 128
MOST = 256
"""Tokens of an output, at most."""
ROUNDS = 4
"""Requests of a run, for each that runs at a time."""
SETTLED_S, AFTER_S = 1.0, 0.3
"""How long the other streams run before requests with schemas come, and after these have ended."""


def emit(**line: Any) -> None:
    print(json.dumps(line), flush=True)


# --- tokens a second ------------------------------------------------------------------------------------------------


class Offline:
    """An `LLM` whose runs are timed."""

    def __init__(self, model: str, streams: int, settings: dict[str, Any]) -> None:
        self._llm = LLM(model, **{"load_format": "dummy", "max_num_seqs": streams, "max_model_len": 1_024, **settings})
        self._draw, self._size = random.Random(0), vocabulary(Path(model))
        self._number = ROUNDS * streams

    def __enter__(self) -> Offline:
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()

    def constrained(self, schemas: Sequence[Schema]) -> tuple[float, list[int], int]:
        """Seconds, tokens of each output, and how many outputs are whole; each of these is JSON."""
        each = [SamplingParams(max_tokens=MOST, structured_outputs=StructuredOutputsParams(json=s)) for s in schemas]
        seconds, outputs = self._run([each[number % len(each)] for number in range(self._number)])
        whole = [output.text for output in outputs if output.finish_reason == "stop"]
        for text in whole:
            json.loads(text)
        return seconds, [len(output.token_ids) for output in outputs], len(whole)

    def unconstrained(self, tokens: Sequence[int]) -> float:
        """Seconds for as many tokens of each output."""
        return self._run([SamplingParams(max_tokens=n, min_tokens=n, ignore_eos=True) for n in tokens])[0]

    def _run(self, params: Sequence[SamplingParams]) -> tuple[float, list[Any]]:
        prompts = [{"prompt_token_ids": self._draw.choices(range(1_000, self._size), k=PROMPT)} for _ in params]
        began = time.perf_counter()
        results = self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began, [result.outputs[0] for result in results]


def measure_tokens(model: str, streams: int, runs: int, settings: dict[str, Any]) -> None:
    """Emit tokens a second of each run, and the share that is left under schemas."""
    schemas = [schema(number) for number in range(streams)]
    with Offline(model, streams, settings) as engine:
        began = time.perf_counter()
        engine.unconstrained(engine.constrained(schemas)[1])  # grammars are compiled, kernels loaded
        emit(warm_up_s=time.perf_counter() - began)
        shares = []
        for _ in range(runs):
            seconds, tokens, whole = engine.constrained(schemas)
            free = engine.unconstrained(tokens)
            shares.append(free / seconds)
            emit(tokens=sum(tokens), whole=whole, requests=len(tokens), constrained=sum(tokens) / seconds,
                 unconstrained=sum(tokens) / free)  # fmt: skip
    emit(
        row=f"structured, {streams} streams, constrained / unconstrained", value=statistics.median(shares), runs=shares
    )


# --- stalls ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """What the other streams noticed of requests that came at once.

    Attributes:
        before_ms, longest_ms: Longest time between two tokens of any stream before they came, and from then until
            they had ended.
        seconds: How long they took.
        failed: How many of them failed.
    """

    before_ms: float
    longest_ms: float
    seconds: float
    failed: int


async def arrival(server: Server, model: str, streams: int, schemas: Sequence[Schema | None], size: int) -> Arrival:
    """Of one request for each entry, with that schema or none."""
    draw = random.Random(len(schemas))
    async with Connections(f"http://127.0.0.1:{server.port}", 30.0) as connections:
        client = StreamingClient(
            connections, "/v1/completions", "openai", {"model": model, "temperature": 1.0, "ignore_eos": True}
        )
        prompts = [draw.choices(range(1_000, size), k=PROMPT) for _ in range(streams)]
        others = [asyncio.create_task(client.ask(Sample(prompt, 800))) for prompt in prompts]
        await asyncio.sleep(SETTLED_S)
        came = time.perf_counter()
        statuses = await asyncio.gather(
            *(_chat(connections, model, number, each) for number, each in enumerate(schemas))
        )
        ended = time.perf_counter()
        outcomes = await asyncio.gather(*others)
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        raise RuntimeError(errors[0])
    if max(outcome.last for outcome in outcomes) < ended:
        emit(note="the other streams ended before the requests did")
    return Arrival(
        longest(outcomes, came - SETTLED_S / 2, came), longest(outcomes, came, ended + AFTER_S), ended - came,
        sum(status != OK for status in statuses),
    )  # fmt: skip


async def _chat(connections: Connections, model: str, number: int, wanted: Schema | None) -> int:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"Describe number {number} in a few words."}],
        "max_tokens": 64,
        "temperature": 1.0,
    }
    if wanted is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}
    return await connections.post("/v1/chat/completions", json.dumps(body).encode(), lambda piece: None)


def longest(outcomes: Sequence[Outcome], start: float, end: float) -> float:
    """Most milliseconds between two tokens of a stream that overlap the time from `start` to `end`."""
    found = 0.0
    for outcome in outcomes:
        now = outcome.start + (outcome.ttft or 0.0)
        for gap in outcome.itls:
            if now < end and now + gap > start:
                found = max(found, gap)
            now += gap
    return found * 1e3


def measure_stalls(model: str, streams: int, runs: int, settings: Sequence[str]) -> None:
    """Emit each arrival, and the longest stall under schemas."""
    size, others = vocabulary(Path(model)), max(1, streams // 2)
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "server.log"
        limits = [f"max_num_seqs={streams + others}", "max_model_len=2048"]
        with serve(Path(model), [*limits, *settings], {}, log) as server:
            found = []
            warm = [schema(-1), None]  # the mask process starts
            asyncio.run(arrival(server, model, others, warm, size))
            for run in range(runs):
                new = [schema(1_000 * (run + 1) + number) for number in range(streams)]
                for schemas in (new, [None] * streams):
                    one = asyncio.run(arrival(server, model, others, schemas, size))
                    emit(schemas=schemas is new, **one.__dict__)
                    if schemas is new:
                        found.append(one.longest_ms)
    emit(row=f"structured, {streams} schemas at once, longest stall", value=max(found), runs=found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--parts", default="tokens,stalls")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    if "tokens" in arguments.parts:
        measure_tokens(arguments.model, arguments.streams, arguments.runs, dict(map(setting, arguments.set)))
    if "stalls" in arguments.parts:
        measure_stalls(arguments.model, arguments.streams, arguments.runs, arguments.set)


if __name__ == "__main__":
    main()
