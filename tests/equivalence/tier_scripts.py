"""Scripts of conversations whose keys and values go to host memory and to a disk, with faults, on engines of tiny fp32
models: every answer is that of a model that caches nothing.

    python -m tests.equivalence.tier_scripts --scripts 1000

holds so many. Each script has some of these faults: bits of the file are flipped, it is cut off, writes are torn or
find the disk full, reads are slow, the engine is killed between two turns of its loop and its requests are asked again,
and it is restarted.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from quire.runtime.worker.kv_transfer import CpuBlockTransfer
from quire.scheduling.kvcache.disk_pool import DiskPool
from tests.engine.harness import add
from tests.equivalence.conversation_engines import DRAFTS, SCARCE, TIER, ModelEngine, make_model
from tests.models_sweep.rows import SHAPE

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", TIER),
    "gemma3": ("Gemma3ForCausalLM", TIER | {"num_gpu_blocks_override": 40}),
    "deepseek v3, drafts": ("DeepseekV3ForCausalLM", TIER | DRAFTS),
    "llama, recomputed": ("LlamaForCausalLM", TIER | {"preemption_mode": "recompute"}),
}
LONGEST = SCARCE["max_model_len"] - 12
FAULTS = ("flip", "cut", "torn", "full", "slow", "kill", "restart")


class Faults:
    """What may happen to a disk, as a script says."""

    def __init__(self, rng: random.Random, names: Sequence[str]) -> None:
        self.names = set(names)
        self.counts: Counter[str] = Counter()
        self._rng = rng
        self._pwritev, self._preadv = os.pwritev, os.preadv

    def write(self, file: int, pieces: list[memoryview], at: int) -> int:
        if "full" in self.names and self._rng.random() < 0.2:
            self.counts["full"] += 1
            raise OSError(errno.ENOSPC, "planted")
        if "torn" in self.names and self._rng.random() < 0.2:  # nobody notices before it is read
            self.counts["torn"] += 1
            self._pwritev(file, pieces[:1], at)
            return sum(piece.nbytes for piece in pieces)
        return self._pwritev(file, pieces, at)

    def read(self, file: int, pieces: list[memoryview], at: int) -> int:
        if "slow" in self.names and self._rng.random() < 0.2:
            self.counts["slow"] += 1
            time.sleep(0.01)
        return self._preadv(file, pieces, at)

    def spoil(self, file: Path) -> None:
        """Flip bits of a file that nobody uses now, or cut it off; the beginning stays, without which it is empty."""
        content = bytearray(file.read_bytes())
        if "flip" in self.names:
            for _ in range(3):
                content[self._rng.randrange(len(content) // 2, len(content))] ^= 1 << self._rng.randrange(8)
            self.counts["flip"] += 1
        if "cut" in self.names:
            del content[len(content) - self._rng.randrange(3_000) :]
            self.counts["cut"] += 1
        file.write_bytes(content)


class TierScripts:
    """Holds scripts on engines of one kind, beside one that caches nothing."""

    def __init__(self, directory: Path, kind: str) -> None:
        architecture, self._settings = KINDS[kind]
        self._directory, model = directory, directory / architecture
        self._model = model if model.exists() else make_model(model, architecture)
        cold = {"max_num_seqs": 1, "max_num_batched_tokens": 200, "num_gpu_blocks_override": 150}
        self._cold = ModelEngine(self._model, enable_prefix_caching=False, **cold)
        self._number = 0
        self.counts: Counter[str] = Counter()

    def close(self) -> None:
        self._cold.client.close()

    def run(self, seed: int) -> None:
        """Hold the conversations of a seed.

        Raises:
            AssertionError: An answer is not that of the model that caches nothing, or a request failed.
        """
        rng = random.Random(seed)
        faults = Faults(rng, rng.sample(FAULTS, rng.randint(1, 3)))
        disk = self._directory / f"disk{seed}" if rng.random() < 0.75 else None
        sessions: list[list[int]] = []
        with mock.patch.object(os, "pwritev", faults.write), mock.patch.object(os, "preadv", faults.read):
            engine = self._start(disk)
            for _ in range(rng.randint(3, 6)):
                prompts = [self._prompt(rng, sessions) for _ in range(rng.choice((1, 1, 2, 3)))]
                most = rng.randint(1, 16)
                expected = [self._alone(prompt, most) for prompt in prompts]
                if "kill" in faults.names and rng.random() < 0.4:
                    engine = self._killed(engine, prompts, most, rng, disk, faults)
                self._ask(engine, prompts, most, expected, f"script {seed}")
                sessions = [*sessions, *([*p, *e] for p, e in zip(prompts, expected, strict=True))][-6:]
                if ("restart" in faults.names and rng.random() < 0.4) or {"flip", "cut"} & faults.names:
                    self._end(engine)
                    if disk is not None:
                        faults.spoil(disk / "kv_blocks")
                    faults.counts["restart"] += 1
                    engine = self._start(disk)
            self._end(engine)
        self.counts += faults.counts
        if disk is not None:
            shutil.rmtree(disk)

    def _start(self, disk: Path | None) -> ModelEngine:
        settings = self._settings | {"max_num_seqs": 4, "max_num_batched_tokens": 40, "mamba_block_size": 16}
        if disk is not None:
            settings |= {"kv_disk_path": str(disk), "kv_disk_size": 0.001}
        return ModelEngine(self._model, **settings)

    def _end(self, engine: ModelEngine) -> None:
        load = engine.client.heartbeat().load.tier
        assert load is not None
        self.counts["stored"] += load.stored_bytes > 0
        self.counts["loaded"] += load.loaded_bytes > 0
        if load.disk is not None:
            self.counts["from disk"] += load.disk.loaded_bytes > 0
            self.counts["unread"] += load.disk.unread
            self.counts["unwritten"] += load.disk.unwritten
        engine.client.close()

    def _killed(
        self,
        engine: ModelEngine,
        prompts: Sequence[Sequence[int]],
        most: int,
        rng: random.Random,
        disk: Path | None,
        faults: Faults,
    ) -> ModelEngine:
        """Ask, and let the engine die on the way: what its successor finds is the file as it was at that moment."""
        for prompt in prompts:
            self._number += 1
            engine.client.send(add(self._number, prompt, most))
        engine._wait = 0.01  # it may be done before
        for _ in range(rng.randint(0, 12)):
            engine.step()
        left = None if disk is None else (disk / "kv_blocks").read_bytes()
        self._end(engine)
        if disk is not None and left is not None:
            (disk / "kv_blocks").write_bytes(left)
        faults.counts["kill"] += 1
        return self._start(disk)

    def _ask(
        self,
        engine: ModelEngine,
        prompts: Sequence[Sequence[int]],
        most: int,
        expected: Sequence[Sequence[int]],
        name: str,
    ) -> None:
        numbers = range(self._number + 1, self._number + 1 + len(prompts))
        self._number += len(prompts)
        outcome = engine.run([add(number, prompt, most) for number, prompt in zip(numbers, prompts, strict=True)])
        engine.finish_steps()
        engine.assert_all_free()
        for number, tokens in zip(numbers, expected, strict=True):
            assert outcome.ends[number].reason == "length", f"{name}: {outcome.ends[number]}"
            assert outcome.tokens[number] == tokens, f"{name}: other tokens"

    def _prompt(self, rng: random.Random, sessions: Sequence[list[int]]) -> list[int]:
        history = rng.choice(sessions) if sessions and rng.random() < 0.85 else []
        if rng.random() < 0.2:
            history = history[: rng.randint(0, len(history))]
        return [*history[: LONGEST - 45], *(rng.randrange(SHAPE["vocab_size"]) for _ in range(rng.randint(1, 28)))]

    def _alone(self, prompt: Sequence[int], most: int) -> list[int]:
        self._number += 1
        return list(self._cold.run([add(self._number, prompt, most)]).tokens[self._number])


@contextmanager
def tier_scripts(directory: Path, kind: str) -> Iterator[TierScripts]:
    """Start what holds scripts of one of KINDS, and close it. Whatever the machine does, tiers are used."""
    with (
        mock.patch.object(CpuBlockTransfer, "measure_load_ms", return_value=1e-9),
        mock.patch.object(DiskPool, "learn"),
    ):
        made = TierScripts(directory, kind)
        try:
            yield made
        finally:
            made.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Hold scripts on all kinds of engines."""
    parser = argparse.ArgumentParser(prog="python -m tests.equivalence.tier_scripts", description=__doc__)
    parser.add_argument("--scripts", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first one")
    options = parser.parse_args(arguments)
    failed = 0
    with tempfile.TemporaryDirectory() as directory:
        for number, kind in enumerate(KINDS):
            seeds = range(options.first + number, options.first + options.scripts, len(KINDS))
            with tier_scripts(Path(directory), kind) as scripts:
                for seed in seeds:
                    try:
                        scripts.run(seed)
                    except AssertionError as error:
                        failed += 1
                        print(f"{kind}: {error}", flush=True)
            print(f"{kind:20} {len(seeds):5} scripts; {dict(sorted(scripts.counts.items()))}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
