"""What it costs other streams that adapters are brought from the host to the device.

    python benchmarks/h200/lora_swaps.py --model DIR [--streams 16] [--slots 8] [--adapters 40] [--seconds 4]

Streams decode with adapters that stay on the device; as many of each length are under way at any time, so that steps
take as long at the end as at the beginning. Beside them short requests come at a fixed rate. For some seconds in turn
these share the few adapters that there is room for beside the streams', or each has another that must be brought first;
so steps have as many adapters either way. One JSON line for each kind, with milliseconds between two pieces of a
stream; the last has the ratio of the 99th percentiles. The weights of model and adapters are random.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lora import make_adapters

from quire import AsyncLLM, LoRARequest, SamplingParams
from quire.sampling_params import RequestOutputKind

_RESIDENT = 4
"""Adapters of the streams."""
_TURNS = 3
_GUEST_TOKENS = 8
_PROMPT_TOKENS, _STREAM_TOKENS = 16, 1_040
"""Of a prompt, and of a stream with its prompt before it begins anew."""
KINDS = ("resident", "swapped")


class Load:
    """Streams, and guests beside them.

    Args:
        llm: With room for all adapters on the host.
        adapters: The first few are the streams'.
        slots: For so many the device has room.
        period_s: From guest to guest.
    """

    def __init__(self, llm: AsyncLLM, adapters: Sequence[LoRARequest], slots: int, period_s: float) -> None:
        self._llm = llm
        self._adapters = adapters
        self._slots = slots
        self._period_s = period_s
        self._kind: str | None = None
        self.gaps: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.guests: dict[str, list[float]] = {kind: [] for kind in KINDS}

    async def run(self, streams: int, seconds: float) -> None:
        """Each kind of guests for so many seconds, in turns."""
        for adapter in self._adapters:  # bring all to the host
            await self._guest(adapter)
        running = [
            asyncio.create_task(self._stream(number, number * (_STREAM_TOKENS - _PROMPT_TOKENS) // streams))
            for number in range(streams)
        ]
        await asyncio.sleep(1)
        resident = self._adapters[_RESIDENT : self._slots]
        next_adapter: dict[str, Iterator[LoRARequest]] = {
            "resident": itertools.cycle(resident),
            "swapped": itertools.cycle(self._adapters[self._slots :]),
        }
        for kind in KINDS * _TURNS:
            for adapter in resident:
                await self._guest(adapter)
            self._kind = kind
            guests, began = [], time.perf_counter()
            for number in range(int(seconds / self._period_s)):
                await asyncio.sleep(began + number * self._period_s - time.perf_counter())
                guests.append(asyncio.create_task(self._timed_guest(kind, next(next_adapter[kind]))))
            self._kind = None
            await asyncio.gather(*guests)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _stream(self, number: int, behind: int) -> None:
        """One stream after another, the first from a prompt that is so many tokens longer."""
        adapter = self._adapters[number % _RESIDENT]
        while True:
            prompt = [number + 1] * (_PROMPT_TOKENS + behind)
            last, seen, behind = 0.0, None, 0
            async for _ in self._generate(prompt, _STREAM_TOKENS - len(prompt), adapter):
                now = time.perf_counter()
                if seen is not None and seen == self._kind:
                    self.gaps[seen].append((now - last) * 1e3)
                last, seen = now, self._kind

    async def _timed_guest(self, kind: str, adapter: LoRARequest) -> None:
        began = time.perf_counter()
        await self._guest(adapter)
        self.guests[kind].append((time.perf_counter() - began) * 1e3)

    async def _guest(self, adapter: LoRARequest) -> None:
        async for _ in self._generate([1] * _PROMPT_TOKENS, _GUEST_TOKENS, adapter):
            pass

    def _generate(self, prompt: list[int], tokens: int, adapter: LoRARequest) -> Any:
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        return self._llm.generate({"prompt_token_ids": prompt}, params, lora_request=adapter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--adapters", type=int, default=40)
    parser.add_argument("--rate", type=float, default=20.0, help="guests a second")
    parser.add_argument("--seconds", type=float, default=4.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        made = make_adapters(Path(directory), Path(arguments.model), arguments.rank, arguments.adapters)
        llm = AsyncLLM(
            arguments.model, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=64, enable_lora=True,
            max_loras=arguments.slots, max_cpu_loras=arguments.adapters, max_lora_rank=arguments.rank,
        )  # fmt: skip
        load = Load(llm, made, arguments.slots, 1 / arguments.rate)
        try:
            asyncio.run(load.run(arguments.streams, arguments.seconds))
        finally:
            llm.shutdown()
    for kind in KINDS:
        p50, p99, most = np.percentile(load.gaps[kind], [50, 99, 100])
        own = float(np.median(load.guests[kind]))
        print(json.dumps({
            "guests": kind, "number": len(load.guests[kind]), "guest_p50_ms": round(own, 2),
            "itl_p50_ms": round(p50, 3), "itl_p99_ms": round(p99, 3), "itl_max_ms": round(most, 2),
        }), flush=True)  # fmt: skip
    resident, swapped = (float(np.percentile(load.gaps[kind], 99)) for kind in KINDS)
    print(json.dumps({"p99_swapped_by_resident": round(swapped / resident, 3)}))


if __name__ == "__main__":
    main()
