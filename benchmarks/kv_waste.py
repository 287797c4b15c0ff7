"""How much of the KV cache is held but never written: what paging wastes.

    python benchmarks/kv_waste.py [--requests 400] [--blocks 2048] [--json]

Requests of 32 to 1,024 tokens (prompt and output together, mean above 300) come at random through the real engine on
an executor without a model, in blocks of 16 tokens. After every step: the tokens that would still fit into the
allocated blocks, as a share of all tokens that these blocks can hold. An engine that reserves the longest length for
each sequence wastes about half of its blocks here.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import asdict, dataclass

from quire.engine.inprocess import InProcessClient
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import Deltas
from quire.foundation.messages.to_engine import Add
from quire.sampling_params import SamplingParams
from tests.executor.fake import FakeExecutor

BLOCK_SIZE, SHORTEST, LONGEST = 16, 32, 1_024
ROWS = 64


@dataclass(frozen=True)
class Waste:
    """Shares of the allocated blocks over all steps, and what the load was like."""

    mean: float
    worst: float
    results: int
    mean_length: float
    mean_running: float
    preemptions: int


def measure(requests: int, blocks: int, seed: int = 0) -> Waste:
    """Run all requests; each sample is taken right after a step, while at least half of the rows are running."""
    client = InProcessClient(
        Config().with_values(
            max_num_seqs=ROWS, max_num_batched_tokens=512, max_model_len=LONGEST, block_size=BLOCK_SIZE
        ),
        FakeExecutor(num_blocks=blocks, block_size=BLOCK_SIZE, sample=lambda history, num_sampled, vocab_size: 7),
    )
    adds = _load(requests, random.Random(seed))
    client.receive(0)
    for add in adds[:ROWS]:
        client.send(add)
    waiting, ended, samples, running, preemptions = adds[ROWS:], 0, [], [], 0
    while ended < requests:
        message = client.receive(None)
        assert isinstance(message, Deltas)
        ended += len(message.ends)
        for add in waiting[: len(message.ends)]:
            client.send(add)
        waiting, load = waiting[len(message.ends) :], message.load
        if load.running >= ROWS // 2:
            samples.append(load.unwritten_tokens / ((load.num_blocks - load.free_blocks) * BLOCK_SIZE))
            running.append(load.running)
        preemptions = load.preemptions
    client.close()
    lengths = [add.prompt_len + (add.sampling.max_tokens or 0) for add in adds]
    return Waste(
        statistics.mean(samples), max(samples), len(samples), statistics.mean(lengths), statistics.mean(running),
        preemptions,
    )  # fmt: skip


def _load(requests: int, draw: random.Random) -> list[Add]:
    adds = []
    for number in range(requests):
        length = draw.randint(SHORTEST, LONGEST)
        prompt_len = draw.randint(1, length - 1)
        prompt = [draw.randrange(512) for _ in range(prompt_len)]
        params = SamplingParams(max_tokens=length - prompt_len)
        adds.append(Add(number, prompt, prompt_len, params, [], seed=number, arrival=float(number)))
    return adds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--blocks", type=int, default=2_048)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    waste = measure(arguments.requests, arguments.blocks)
    if arguments.json:
        print(json.dumps(asdict(waste)))
        return
    print(
        f"waste {waste.mean:.2%} in the mean, {waste.worst:.2%} at worst, over {waste.results:,} results; "
        f"{waste.mean_running:.0f} sequences running, mean length {waste.mean_length:.0f} tokens, "
        f"{waste.preemptions} preemptions"
    )


if __name__ == "__main__":
    main()
