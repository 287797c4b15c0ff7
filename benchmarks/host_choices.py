"""What a request with n choices costs the host: client and engine, with the device's work left out.

    python benchmarks/host_choices.py [--tokens 131072] [--choices 1,8,128] [--runs 5]

The device is a stub that samples token 7, and each choice ends after one token. Prints medians in milliseconds: the
client's work (limits, ids, encoding), from there to the first plan (decoding, checks, queueing), from there to the last
End (hashing, block tables), and the longest turn of the engine's loop, for which all other streams wait.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque

import msgspec

from quire.engine.build import ModelRuntimeInfo
from quire.engine.core import EngineCore
from quire.engine.input_processor import InputProcessor
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import Deltas, FromEngine
from quire.foundation.messages.to_engine import Add, ToEngine
from quire.foundation.messages.workers import DeviceLimits, Plan, Result
from quire.runtime.executor.executor import NoOrders
from quire.sampling_params import SamplingParams

VOCABULARY = 32_000
BLOCK_SIZE = 16


class StubExecutor:
    """Samples token 7 at once; knows when it got its first plan."""

    max_in_flight = 2
    orders = NoOrders()

    def __init__(self) -> None:
        self._plans: deque[Plan] = deque()
        self.first_plan: float | None = None

    def check(self) -> None:
        """It never breaks."""

    def submit(self, plan: Plan) -> None:
        self.first_plan = self.first_plan or time.perf_counter()
        self._plans.append(plan)

    def collect(self, timeout: float | None) -> Result:
        plan = self._plans.popleft()
        return Result(plan.step, [1] * len(plan.sampled_rows), [7] * len(plan.sampled_rows))


class DecodingPort:
    """A port whose messages come encoded, as over ZMQ."""

    def __init__(self) -> None:
        self.inbox: list[bytes] = []
        self.ends = 0
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def drain(self, wait: float | None) -> list[ToEngine]:
        encoded, self.inbox = self.inbox, []
        return [self._decoder.decode(each) for each in encoded]

    def send(self, client: int, message: FromEngine) -> None:
        self.ends += len(message.ends) if isinstance(message, Deltas) else 0


class Bench:
    """An engine on a stub, and its client."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._executor, self._port, self._random = StubExecutor(), DecodingPort(), random.Random(0)
        config = Config().with_values(
            max_num_seqs=256, max_num_batched_tokens=8_192, max_model_len=tokens + BLOCK_SIZE, block_size=BLOCK_SIZE
        )
        limits = DeviceLimits(num_blocks=4 * (tokens // BLOCK_SIZE) + 1_024, vocab_size=VOCABULARY)
        self._core = EngineCore(config, limits, ModelRuntimeInfo(), self._executor, self._port, SystemClock())  # type: ignore[arg-type]
        self._input_processor = InputProcessor(0, self._core.ready, [], 5, "fcfs", SystemClock(), lambda: 5)
        self._encoder = msgspec.msgpack.Encoder()

    def request(self, choices: int) -> list[float]:
        """Seconds of the client, to the first plan, to the last End, and of the longest turn."""
        prompt = [self._random.randrange(VOCABULARY) for _ in range(self._tokens)]
        began = time.perf_counter()
        params = SamplingParams(n=choices, max_tokens=1, ignore_eos=True)
        adds: list[Add] = self._input_processor.adds(prompt, params)
        self._port.inbox = [self._encoder.encode(adds[0])]
        sent = time.perf_counter()
        self._executor.first_plan, self._port.ends, turns = None, 0, []
        while self._port.ends < choices:
            turn = time.perf_counter()
            self._core.turn(0.0)
            turns.append(time.perf_counter() - turn)
        done = time.perf_counter()
        assert self._executor.first_plan is not None
        self._core.turn(0.0)  # what is still in flight
        self._core.turn(0.0)
        return [sent - began, self._executor.first_plan - sent, done - self._executor.first_plan, max(turns)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--choices", default="1,8,128")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    bench = Bench(arguments.tokens)
    for choices in map(int, arguments.choices.split(",")):
        parts = zip(*(bench.request(choices) for _ in range(arguments.runs)), strict=True)
        times = dict(zip(("client", "queued", "served", "longest turn"), map(statistics.median, parts), strict=True))
        print(f"{choices:4} choices ", "  ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in times.items()))


if __name__ == "__main__":
    main()
