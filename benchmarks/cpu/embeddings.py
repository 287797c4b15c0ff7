"""How fast texts become vectors on a CPU, against sentence-transformers.

    python -m benchmarks.cpu.embeddings DIRECTORY

All engines run in one process, in turn, several rounds: so a machine whose speed drifts is as slow for one as for all.
Prints the least and the median processor time of each, and how many times as fast `quire` is as the better of
sentence-transformers in float32 and bfloat16.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch

Texts = Sequence[str]
Encode = Callable[[Texts], object]
WORDS = ("river", "stone", "light", "house", "green", "winter", "song", "paper", "market", "garden", "train", "window")


def texts(lengths: Sequence[int], seed: int) -> list[str]:
    """Return texts of so many tokens each, with [CLS] and [SEP]; each of WORDS is one token."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=length - 2)) for length in lengths]


def sentence_transformers(directory: str, dtype: torch.dtype) -> Encode:
    """Load the model with sentence-transformers, which makes vectors of 32 texts at once."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(directory, device="cpu", model_kwargs={"dtype": dtype})
    return lambda batch: model.encode(list(batch), batch_size=32, show_progress_bar=False)


def quire(directory: str, dtype: str) -> Encode:
    """Load the model with Quire."""
    from quire import LLM

    llm = LLM(directory, dtype=dtype)
    return lambda batch: llm.embed(list(batch), use_tqdm=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="the model, with sentence-transformers' files")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=(), help="names of engines; default: all")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engines: dict[str, Callable[[], Encode]] = {
        "sentence-transformers float32": lambda: sentence_transformers(options.directory, torch.float32),
        "sentence-transformers bfloat16": lambda: sentence_transformers(options.directory, torch.bfloat16),
        "quire auto": lambda: quire(options.directory, "auto"),
        "quire float32": lambda: quire(options.directory, "float32"),
    }
    loaded = {name: load() for name, load in engines.items() if not options.only or name in options.only}
    draw = random.Random(0)
    workloads = {
        "32 x 128 tokens": texts([128] * 32, 1),
        "mixed lengths, 32 x 8 to 250": texts([draw.randint(8, 250) for _ in range(32)], 2),
    }
    for title, batch in workloads.items():
        times: dict[str, list[float]] = {name: [] for name in loaded}
        for encode in loaded.values():
            encode(batch)
        for _ in range(options.rounds):
            for name, encode in loaded.items():
                began = time.process_time()
                encode(batch)
                times[name].append(time.process_time() - began)
        print(title)
        for name, spent in times.items():
            print(f"  {name:32} least {min(spent) * 1e3:7.1f} ms, median {statistics.median(spent) * 1e3:7.1f} ms")
        theirs = [spent for name, spent in times.items() if name.startswith("sentence")]
        if theirs and "quire auto" in times:
            least, median = min(map(min, theirs)), min(map(statistics.median, theirs))
            own = times["quire auto"]
            print(
                f"  auto: {least / min(own):.2f} x by the least, {median / statistics.median(own):.2f} x by the median"
            )
        if theirs and "quire float32" in times:
            print(f"  float32 against float32: {min(theirs[0]) / min(times['quire float32']):.2f} x by the least")


if __name__ == "__main__":
    main()
