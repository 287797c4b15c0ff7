"""What a decode step costs the host: engine and worker, with the device's work left out.

    python benchmarks/host_step.py [--sequences 256,1024] [--steps 400] [--json]

Engine: drain the inbox, schedule, process the output, gather and encode the Deltas. Worker: stage the plan's columns,
apply them to the slot table and prepare the batch in persistent buffers; forward, sampling and attention are stubs.
Every sequence samples one token a step; one in 16 takes a new block. (Blocks that an output fills are hashed for the
prefix cache when it ends.) Prints the median milliseconds of a step by part, in CPU time of this thread, so that other
processes on the machine do not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque

import msgspec
import torch

from quire.compute.attention.metadata import AttentionMetadata
from quire.engine.build import ModelRuntimeInfo
from quire.engine.core import EngineCore
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import FromEngine
from quire.foundation.messages.to_engine import Add, ToEngine
from quire.foundation.messages.workers import DeviceLimits, Plan, Result
from quire.runtime.executor.executor import NoOrders
from quire.runtime.worker.batch import BatchBuffers
from quire.runtime.worker.buffer_ring import BufferRing
from quire.runtime.worker.host_batch import HostBatch
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.staging_buffer import StagingBuffer
from quire.runtime.worker.step import StepInputs
from quire.sampling_params import SamplingParams

BLOCK_SIZE = 16
PROMPT = 64


class StubExecutor:
    """A worker's host side, and a device that always samples token 7."""

    max_in_flight = 2
    orders = NoOrders()

    def __init__(self, sequences: int, steps: int) -> None:
        length = PROMPT + 2 * steps + 64
        blocks = sequences * (length // BLOCK_SIZE + 1)
        self.device_limits = DeviceLimits(num_blocks=blocks, vocab_size=32_000)
        self._slots = SlotTable(sequences, length // BLOCK_SIZE + 1, 1, 32_000, torch.device("cpu"))
        self._batches = BatchBuffers(self._slots, sequences, sequences * PROMPT)
        self._staging = StagingBuffer(6 * sequences * (1 + PROMPT), BufferRing(torch.device("cpu")))
        self._plans: deque[Plan] = deque()
        self.seconds = 0.0

    def start(self) -> DeviceLimits:
        return self.device_limits

    def check(self) -> None:
        """It never breaks."""

    def submit(self, plan: Plan) -> None:
        began = time.thread_time()
        self._slots.admit(plan.admitted)
        host = HostBatch.of(plan, self._slots.host.max_lengths)
        self._slots.host.max_lengths[host.slots] += host.counts
        staging = self._staging
        copied = staging.begin()
        inputs = StepInputs(
            slots=copied.add(host.slots),
            token_ids=copied.add(host.token_ids),
            counts=copied.add(host.counts),
            row_of_token=copied.add(host.row_of_token),
            offsets=copied.add(host.offsets),
            attention=AttentionMetadata(),
            sampled_slots=copied.add(host.sampled_slots),
            logits_indices=copied.add(host.logits_indices),
        )
        zero_copy = copied.end()
        slot_updates = self._slots.stage(plan, zero_copy)
        zero_copy.finish().copy_to_device()
        self._slots.apply(slot_updates)
        self._batches.prepare(host, inputs)
        self.seconds += time.thread_time() - began
        self._plans.append(plan)

    def collect(self, timeout: float | None) -> Result:
        plan = self._plans.popleft()
        return Result(plan.step, [1] * len(plan.sampled_rows), [7] * len(plan.sampled_rows))

    def close(self) -> None:
        pass


class EncodingPort:
    """A port that encodes messages as for ZMQ and discards them."""

    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []
        self._encoder = msgspec.msgpack.Encoder()
        self.bytes = 0

    def drain(self, wait: float | None) -> list[ToEngine]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, client: int, message: FromEngine) -> None:
        self.bytes = len(self._encoder.encode(message))


def measure(sequences: int, steps: int) -> dict[str, float]:
    """Median milliseconds of a step in which every sequence samples a token."""
    executor, port = StubExecutor(sequences, steps), EncodingPort()
    config = Config().with_values(
        max_num_seqs=sequences,
        max_num_batched_tokens=sequences * PROMPT,
        max_model_len=PROMPT + 2 * steps + 64,
        block_size=BLOCK_SIZE,
    )
    core = EngineCore(config, executor.start(), ModelRuntimeInfo(), executor, port, SystemClock())
    params = SamplingParams(max_tokens=2 * steps + 32, ignore_eos=True)
    for i in range(sequences):
        prompt = [(i * 31 + j) % 32_000 for j in range(PROMPT - i % BLOCK_SIZE)]  # blocks fill up at different steps
        port.inbox.append(Add(i, prompt, len(prompt), params, [2], seed=i, arrival=0.0))
    for _ in range(20):
        core.turn(0)
    total, worker = [], []
    for _ in range(steps):
        executor.seconds, began = 0.0, time.thread_time()
        core.turn(0)
        total.append(time.thread_time() - began)
        worker.append(executor.seconds)
    assert core.counts()["running"] == sequences
    median = statistics.median(total) * 1e3
    workers = statistics.median(worker) * 1e3
    p90 = sorted(total)[int(0.9 * steps)] * 1e3
    return {"sequences": sequences, "ms": median, "p90_ms": p90, "worker_ms": workers, "engine_ms": median - workers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="1,16,256,1024")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for count in map(int, arguments.sequences.split(",")):
        row = measure(count, arguments.steps)
        if arguments.json:
            print(json.dumps(row))
        else:
            print("  ".join(f"{name} {value:.3f}" for name, value in row.items()))


if __name__ == "__main__":
    main()
