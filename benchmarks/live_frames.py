"""What the live picture costs: the engine's thread by frame and by step, and an API process by frame.

    python -m benchmarks.live_frames [--sequences 256] [--steps 400] [--blocks 50000]

The engine steps as in host_step.py, whose executor is a stub, so a step is the host's work alone. A frame is
asked for as soon as the engine makes another one. All times are medians of `thread_time`, so other processes do not
count.
"""

from __future__ import annotations

import argparse
import statistics
import time

import msgspec

from benchmarks.host_step import PROMPT, EncodingPort, StubExecutor
from quire.engine import frames
from quire.engine.build import ModelRuntimeInfo
from quire.engine.core import EngineCore
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import Done, FromEngine
from quire.foundation.messages.to_engine import Add, Control
from quire.sampling_params import SamplingParams
from quire.serving.api.routes.monitoring import FRAME_S, picture


class KeepingPort(EncodingPort):
    """Keeps the last frame."""

    def __init__(self) -> None:
        super().__init__()
        self.frame: Done | None = None

    def send(self, client: int, message: FromEngine) -> None:
        super().send(client, message)
        if isinstance(message, Done):
            self.frame = message


def measure(sequences: int, steps: int, blocks: int) -> dict[str, float]:
    """Microseconds: of turns with and without a frame, and of an API process for a frame."""
    executor, port = StubExecutor(sequences, steps), KeepingPort()
    executor.device_limits = msgspec.structs.replace(
        executor.device_limits, num_blocks=max(blocks, executor.device_limits.num_blocks)
    )
    config = Config().with_values(
        max_num_seqs=sequences,
        max_num_batched_tokens=sequences * PROMPT,
        max_model_len=PROMPT + 2 * steps + 64,
        block_size=16,
    )
    frames.NEW_S = 0.0
    every = max(2, -(-sequences // frames.ROWS_A_STEP))
    core = EngineCore(config, executor.device_limits, ModelRuntimeInfo(), executor, port, SystemClock())
    params = SamplingParams(max_tokens=2 * steps + 32, ignore_eos=True)
    port.inbox += [
        Add(i, [(i * 31 + t) % 32_000 for t in range(PROMPT)], PROMPT, params, [], seed=i, arrival=0.0)
        for i in range(sequences)
    ]
    for _ in range(8):
        core.turn(0.0)
    taken: dict[bool, list[float]] = {False: [], True: []}
    api: list[float] = []
    for number in range(steps):
        asked = number % every == 0
        if asked:
            port.inbox.append(Control(number, "frame"))
        began = time.thread_time()
        core.turn(0.0)
        taken[asked].append((time.thread_time() - began) * 1e6)
        if asked and port.frame is not None:
            value = msgspec.msgpack.decode(msgspec.msgpack.encode(port.frame.value))
            began = time.thread_time()
            size = len(picture({"engines": [value]}))
            api.append((time.thread_time() - began) * 1e6)
    with_frame, without = statistics.median(taken[True]), statistics.median(taken[False])
    return {"with": with_frame, "without": without, "api": statistics.median(api), "bytes": size}


def main() -> None:
    """Parse arguments and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--blocks", type=int, default=50_000)
    asked = parser.parse_args()
    found = measure(asked.sequences, asked.steps, asked.blocks)
    frame = found["with"] - found["without"]
    every = max(2, -(-asked.sequences // frames.ROWS_A_STEP))
    print(
        f"{asked.sequences} streams, {asked.blocks} blocks: a turn takes {found['without']:.0f} µs, a frame {frame:.0f}"
    )
    print(f"one frame in {every} steps: {frame / every:.1f} µs a step")
    share = found["api"] / FRAME_S / 1e4
    print(f"API process: {found['api']:.0f} µs and {found['bytes']} bytes a frame: {share:.2f}% of a core")


if __name__ == "__main__":
    main()
