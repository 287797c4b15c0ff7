"""What speculation brings and costs where drafts are accepted at a given rate: steps against the cost model's, and the
tokens a second that adaptive numbers of drafts reach against an engine without speculation.

    python benchmarks/forced_speculation.py [--rows 1,8,32] [--rates 0,0.6] [--drafts 4]
    python benchmarks/h200/speculation.py --forced [--rows 1,4,16,64,256]

The first form is Quill with its draft model, on a CPU; the second a model of Llama-3.1-8B's shape with a draft model of
Llama-3.2-1B's, both of dummy weights, on a GPU. Drafts are accepted at random (`rejection_sample_method: synthetic`),
the one behind accepted ones with probability RATE. Prompts are random tokens, outputs are as long as --tokens. Two
engines run in turns. One line of JSON a figure:

- `steps`: milliseconds from one result to the next where every row has so many drafts (0: the engine without
  speculation); `predicted_ms` by `SpeculativeStepTime`, and `ratio`, predicted by
  measured. `calibrated` is the same where all predictions are corrected by what the step without drafts took.
- `throughput`: tokens a second of the adaptive engine; `ratio` to those without speculation, by the median of turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams, builtin
from quire.compute.attention.metadata import IntArray
from quire.foundation.messages.workers import MaskedDrafts, Result
from quire.models.spec import read_spec
from quire.planning.costmodel.cards import CARDS, CPU_SHARES, GPU_SHARES
from quire.planning.costmodel.hardware import Hardware, cpu, gpu
from quire.planning.costmodel.step_time import StepTime
from quire.runtime.executor.cpu_executor import CpuExecutor
from quire.runtime.executor.gpu_executor import GpuExecutor
from quire.runtime.worker.speculation import adaptive
from quire.runtime.worker.speculation.draft_lengths import Choice, DraftLengths
from quire.runtime.worker.speculation.synthetic_acceptance import SyntheticAcceptance

BLOCK = 16
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_act": "silu",
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "num_attention_heads": 32,
    "num_key_value_heads": 8, "bos_token_id": 128_000, "eos_token_id": 128_009, "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "head_dim": 128},
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Of Llama-3.1-8B and Llama-3.2-1B, without the scaling of RoPE, which costs nothing."""


@dataclass(frozen=True)
class HostTimes:
    """The host's time for drafting, while the device waits.

    Attributes:
        ask_ms: Milliseconds of a step with drafts: taking the last result, finding what the draft model lacks,
            launching the model's step after the drafts.
        pass_ms: Milliseconds of a pass of the draft model, which takes at least as long.
    """

    ask_ms: float
    pass_ms: float


GPU_HOST = HostTimes(ask_ms=0.25, pass_ms=0.1)
"""Measured with Quill on an H100, whose steps take only the host's time: 0.25 ms without drafts, 0.9 ms with four."""
CPU_HOST = HostTimes(ask_ms=0.0, pass_ms=0.0)
"""On a CPU the host computes the step itself, so that the step's own terms include its time."""


class SpeculativeStepTime:
    """Predicts how long steps of a model with drafts take, by the cost model's terms.

    A step of b rows with k drafts each is k passes of the draft model over b rows, one behind another, then a step of
    the model over b · (1 + k) tokens, all of which are sampled. It brings b · (1 + a + a² + … + a^k) tokens where a
    draft is accepted with probability a once those before it are (Leviathan, Kalman, Matias 2023, "Fast Inference from
    Transformers via Speculative Decoding", section 3.1). Which k pays is decided by measured times, in
    `runtime/worker/speculation/draft_lengths.py`.

    Args:
        target: Predicts steps of the model.
        draft: Predicts steps of the draft model; None: drafts are looked up, which takes only the host's time.
        host: The host's times.
    """

    def __init__(self, target: StepTime, draft: StepTime | None, host: HostTimes) -> None:
        self._target, self._draft, self._host = target, draft, host

    def __call__(self, rows: int, context: float, drafts: int) -> float:
        """Return the milliseconds from one result to the next, for rows with `context` tokens and `drafts` drafts."""
        if not drafts:
            return self._target.decode(rows, context)
        drafting_ms = self.drafting_ms(rows, context, drafts)
        return self._host.ask_ms + drafting_ms + self.verification_ms(rows, context, drafts)

    def drafting_ms(self, rows: int, context: float, drafts: int) -> float:
        """Return the milliseconds of the draft model's passes."""
        if self._draft is None:
            return 0.0
        return drafts * max(self._host.pass_ms, self._draft.decode(rows, context))

    def verification_ms(self, rows: int, context: float, drafts: int) -> float:
        """Return the milliseconds of the model's own step."""
        return self._target.verification(rows, context, drafts)

    def tokens_per_s(self, rows: int, context: float, drafts: int, acceptance: float) -> float:
        """Return the tokens a second, if a draft is accepted with probability `acceptance` once those before it are."""
        return 1e3 * rows * tokens_of_a_row(drafts, acceptance) / self(rows, context, drafts)

    def best_drafts(self, rows: int, context: float, most: int, acceptance: float) -> int:
        """Return how many drafts, from 0 to `most`, bring the most tokens a second."""
        rates = [self.tokens_per_s(rows, context, drafts, acceptance) for drafts in range(most + 1)]
        return rates.index(max(rates))


def tokens_of_a_row(drafts: int, acceptance: float) -> float:
    """Return how many tokens a row with so many drafts brings in a step on average.

    A draft is accepted with probability `acceptance` once those before it are.
    """
    return sum(acceptance**place for place in range(drafts + 1))


@dataclass
class Pair:
    """A model and its draft model.

    Attributes:
        target, draft: Directories.
        settings: Of an engine.
        vocab_size: Prompts are drawn from so many tokens.
    """

    target: str
    draft: str
    settings: dict[str, Any]
    vocab_size: int


@dataclass
class Watched:
    """What is seen of engines while they run.

    Attributes:
        results: (seconds, result), as the engine collects them.
        synthetic: What accepts drafts.
        fixed: All rows have so many drafts; None: as many as pay.
    """

    results: list[tuple[float, Result]] = field(default_factory=list)
    synthetic: list[SyntheticAcceptance] = field(default_factory=list)
    drafters: list[adaptive.AdaptiveDrafter] = field(default_factory=list)
    fixed: int | None = None

    def accept(self, rate: float, vocab_size: int) -> None:
        """From now on drafts are accepted at this rate, and what was learned of another is forgotten."""
        for each in self.synthetic:
            each.__init__(rates_of(rate, 16), vocab_size, each._random.device)  # type: ignore[misc]
        for drafter in self.drafters:
            drafter._lengths = DraftLengths(drafter._waits, settles=drafter._inner.on_device)

    def step_ms(self, rows: int, drafts: int) -> float | None:
        """The median time from one result to the next, of steps in which each of so many rows has so many drafts."""
        alike = [(now, _has(result, rows, drafts)) for now, result in self.results]
        times = [1e3 * (now - then) for (then, before), (now, own) in pairwise(alike) if before and own]
        return statistics.median(times) if len(times) >= 5 else None

    def tokens_per_row(self) -> float:
        """That a row with drafts has brought on average."""
        gained = [
            count
            for _, result in self.results
            for count, had in zip(result.counts, result.drafted, strict=False)
            if had
        ]
        return statistics.fmean(gained) if gained else 1.0


def _has(result: Result, rows: int, drafts: int) -> bool:
    drafted = result.drafted or [0] * len(result.counts)
    return len(drafted) == rows and set(drafted) == {drafts}


def rates_of(rate: float, drafts: int) -> list[float]:
    """By position, how likely the draft there and all before it are accepted."""
    return [rate ** (1 + place) for place in range(drafts)]


@contextmanager
def watching() -> Iterator[Watched]:
    """Engines that are made and run within."""
    watched, choose = Watched(), DraftLengths.choose
    made, drafter_made = SyntheticAcceptance.__init__, adaptive.AdaptiveDrafter.__init__
    collects = {kind: kind.collect for kind in (CpuExecutor, GpuExecutor)}

    def note_synthetic(self: SyntheticAcceptance, *others: Any) -> None:
        made(self, *others)
        if not any(self is each for each in watched.synthetic):
            watched.synthetic.append(self)

    def note_drafter(self: adaptive.AdaptiveDrafter, *others: Any, **named: Any) -> None:
        drafter_made(self, *others, **named)
        watched.drafters.append(self)

    def chosen(self: DraftLengths, tokens: int, slots: list[int], most: IntArray) -> Choice:
        if watched.fixed is None:
            return choose(self, tokens, slots, most)
        return Choice(most.clip(max=watched.fixed), 1e6)

    def collecting(kind: Any) -> Callable[..., Result | MaskedDrafts | None]:
        def collect(self: Any, timeout: float | None) -> Result | MaskedDrafts | None:
            found: Result | MaskedDrafts | None = collects[kind](self, timeout)
            if isinstance(found, Result):
                watched.results.append((time.perf_counter(), found))
            return found

        return collect

    SyntheticAcceptance.__init__ = note_synthetic  # type: ignore[method-assign]
    adaptive.AdaptiveDrafter.__init__ = note_drafter  # type: ignore[method-assign]
    DraftLengths.choose = chosen  # type: ignore[method-assign]
    for kind in collects:
        kind.collect = collecting(kind)  # type: ignore[method-assign]
    try:
        yield watched
    finally:
        SyntheticAcceptance.__init__, adaptive.AdaptiveDrafter.__init__ = made, drafter_made  # type: ignore
        DraftLengths.choose = choose  # type: ignore[method-assign]
        for kind, collect in collects.items():
            kind.collect = collect  # type: ignore[method-assign]


def llama_pair(
    directory: Path, shapes: Mapping[str, dict[str, Any]] = SHAPES, common: Mapping[str, Any] = LLAMA, **settings: Any
) -> Pair:
    """Configs of both shapes, with what is `common` to them; weights are dummies."""
    for name, shape in shapes.items():
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps({**common, **shape}))
    first, second = (str(directory / name) for name in shapes)
    dummies = {"load_format": "dummy", "skip_tokenizer_init": True}
    return Pair(first, second, dummies | settings, common["vocab_size"])


def quill_pair(**settings: Any) -> Pair:
    """Quill and its draft model."""
    return Pair("quill", "quill_draft", {"dtype": "bfloat16"} | settings, 2_000)


def predictor(pair: Pair) -> SpeculativeStepTime:
    """By the cost model, for the device that is here."""
    on_gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if on_gpu else ""
    known = [card.hardware for word, card in CARDS.items() if word.upper() in name.upper().split()]
    hardware: Hardware = (known[0] if known else gpu(name)) if on_gpu else cpu(torch.get_num_threads())
    shares, host = (GPU_SHARES, GPU_HOST) if on_gpu else (CPU_SHARES, CPU_HOST)
    specs = [
        read_spec(str(builtin.path(each) if each in builtin.MODELS else each)) for each in (pair.target, pair.draft)
    ]
    target, draft = (StepTime(spec, "bfloat16", hardware, "bfloat16", shares) for spec in specs)
    return SpeculativeStepTime(target, draft, host)


class Comparison:
    """Engines with speculation and without, in turns.

    Args:
        pair: Models.
        watched: See `watching`; engines are made here.
        options: See `arguments`.
    """

    def __init__(self, pair: Pair, watched: Watched, options: argparse.Namespace) -> None:
        self._watched, self._options, self._pair = watched, options, pair
        self._clock = time.process_time if options.cpu_time else time.perf_counter
        rows, length = max(options.rows), options.prompt + options.tokens + options.drafts + 2
        blocks = rows * (length // BLOCK + 2)
        shared: dict[str, Any] = {
            "max_num_seqs": rows, "max_model_len": min(1024, blocks * BLOCK), "swap_space": 0,
            "enable_prefix_caching": False, "num_gpu_blocks_override": blocks, "disable_log_stats": False,
            "block_size": BLOCK,
        } | pair.settings  # fmt: skip
        drafting = {
            "model": pair.draft, "num_speculative_tokens": options.drafts, "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": rates_of(0.5, options.drafts),
        }  # fmt: skip
        self.engines = {
            "off": LLM(pair.target, **shared),
            "on": LLM(pair.target, speculative_config=drafting, **shared),
        }
        self._predict = predictor(pair)

    def run(self, engine: str, rows: int) -> float:
        """Tokens a second of one turn."""
        options, draw = self._options, random.Random(rows)
        prompts: list[Any] = [
            {"prompt_token_ids": [draw.randrange(self._pair.vocab_size) for _ in range(options.prompt)]}
            for _ in range(rows)
        ]
        params = SamplingParams(
            temperature=1.0, seed=1, max_tokens=options.tokens, ignore_eos=True, detokenize=False
        )  # fmt: skip
        self._watched.results.clear()
        gc.collect()  # else some turns, of whichever engine, have a search of all objects: 0.13 s at 256 sequences
        began = self._clock()
        outputs = self.engines[engine].generate(prompts, params, use_tqdm=False)
        return sum(len(each.outputs[0].token_ids) for each in outputs) / (self._clock() - began)

    def steps(self, rows: int, rates: Sequence[float]) -> None:
        """Measured steps beside predicted ones."""
        context = self._options.prompt + self._options.tokens / 2
        self.run("off", rows)
        self.run("off", rows)
        alone = self._watched.step_ms(rows, 0)
        correction = alone / self._predict(rows, context, 0) if alone else 1.0
        self._say_step(rows, 0, None, alone, context, correction)
        for turn, rate in enumerate(rates):
            self._watched.accept(rate, self._pair.vocab_size)
            self._watched.fixed = self._options.drafts
            if not turn:
                self.run("on", rows)  # the engine may have been told before that some steps have none
            self.run("on", rows)
            self._watched.fixed = None
            self._say_step(rows, self._options.drafts, rate, self._watched.step_ms(rows, self._options.drafts), context,
                           correction)  # fmt: skip

    def throughput(self, rows: int, rate: float) -> float:
        """The adaptive engine by the one without speculation; after a turn each that does not count."""
        self._watched.accept(rate, self._pair.vocab_size)
        turns: list[tuple[float, float]] = []
        brought: list[float] = []
        for turn in range(1 + self._options.repeats):
            off, on = (self.run(engine, rows) for engine in ("off", "on"))
            if turn:
                turns.append((off, on))
                brought.append(self._watched.tokens_per_row())
        ratio = statistics.median(on / off for off, on in turns)
        off, on = (statistics.median(column) for column in zip(*turns, strict=True))
        context = self._options.prompt + self._options.tokens / 2
        say(case="throughput", rows=rows, rate=rate, off=round(off, 1), adaptive=round(on, 1), ratio=round(ratio, 3),
            spread=round(max(on / off for off, on in turns) - min(on / off for off, on in turns), 3),
            tokens_of_a_row_with_drafts=round(statistics.fmean(brought), 2),
            best_predicted=self._predict.best_drafts(rows, context, self._options.drafts, rate))  # fmt: skip
        return ratio

    def _say_step(
        self, rows: int, drafts: int, rate: float | None, measured: float | None, context: float, correction: float
    ) -> None:
        predicted = self._predict(rows, context, drafts)
        found: dict[str, Any] = {"case": "steps", "rows": rows, "drafts": drafts}
        if rate is not None:
            found["rate"] = rate
            found["tokens_per_row"] = round(self._watched.tokens_per_row(), 2)
            found["expected"] = round(tokens_of_a_row(drafts, rate), 2)
            found["predicted_drafting_ms"] = round(self._predict.drafting_ms(rows, context, drafts), 3)
        if measured is None:
            say(**found, ms=None)
        else:
            say(**found, ms=round(measured, 3), predicted_ms=round(predicted, 3), ratio=round(predicted / measured, 3),
                calibrated=round(correction * predicted / measured, 3))  # fmt: skip


def say(**figures: Any) -> None:
    """One line."""
    print(json.dumps(figures), flush=True)


def compare(pair: Pair, options: argparse.Namespace) -> list[float]:
    """All of it; the ratios of throughput."""
    with watching() as watched:
        began = time.perf_counter()
        comparison = Comparison(pair, watched, options)
        say(case="start", seconds=round(time.perf_counter() - began, 1))
        ratios = []
        for rows in options.rows:
            if rows in options.step_rows:
                comparison.steps(rows, options.step_rates)
            ratios += [comparison.throughput(rows, rate) for rate in options.rates]
        say(case="end", seconds=round(time.perf_counter() - began, 1), least_ratio=min(ratios, default=None))
        for engine in comparison.engines.values():
            engine.close()
    return ratios


def arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """The options of a comparison."""

    def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
        return lambda text: [kind(each) for each in text.split(",") if each]

    parser.add_argument("--rows", type=numbers(int), default=[1, 8, 32], help="batch sizes")
    parser.add_argument("--rates", type=numbers(float), default=[0.0, 0.6], help="of acceptance, for throughput")
    parser.add_argument("--step-rows", type=numbers(int), default=[1, 8, 32], help="batch sizes whose steps are timed")
    parser.add_argument("--step-rates", type=numbers(float), default=[0.0, 0.5, 0.8, 1.0], help="of acceptance, there")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="processor time of this process, not the clock")
    parser.set_defaults(**defaults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser)
    compare(quill_pair(), parser.parse_args())


def forced_llama(options: argparse.Namespace) -> None:
    """The shapes of Llama."""
    with tempfile.TemporaryDirectory() as directory:
        compare(llama_pair(Path(directory)), options)


if __name__ == "__main__":
    main()
