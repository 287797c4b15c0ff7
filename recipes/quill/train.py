"""Makes Quill and its draft model from nothing, in one command, and examines them.

    python recipes/quill/train.py --output DIR [--minutes 8.5]

Writes DIR/quill, DIR/quill_draft (Hugging Face layout) and DIR/results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from quill.card import Making, name_of, write_card
from quill.chat import Sample, render
from quill.checkpoint import save_model
from quill.corpus import batches, conversation
from quill.decoding import answer_all
from quill.examination import MAX_ANSWER_TOKENS, QUESTIONS, Report, examination, grade
from quill.model import DRAFT, QUILL, Llama
from quill.tokenizer import train_tokenizer
from quill.training import train
from quill.training_loop import Rates, Trained
from tokenizers import Tokenizer

TOKENIZER_CONVERSATIONS = 30_000
DRAFT_SHARE = 0.13  # of the training time
EXPORT_SECONDS = 8.0


def main() -> None:
    options = _options()
    started = time.monotonic()
    deadline = started + 60 * options.minutes
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = _tokenizer(options.seed, options.tokenizer_conversations)
    print(f"tokenizer: {tokenizer.get_vocab_size()} tokens, {time.monotonic() - started:.1f} s", flush=True)
    stream = batches(tokenizer, options.rows, options.seed, options.workers, device)
    budget = deadline - time.monotonic() - EXPORT_SECONDS
    draft_seconds = budget * DRAFT_SHARE

    quill = Llama(QUILL).to(device)
    first = train(quill, stream, budget - draft_seconds, Rates())
    _describe("quill", quill, first)
    draft = Llama(DRAFT).to(device)
    # Compilation took part of the budget; the draft gets what is left of it.
    draft_seconds = min(draft_seconds, deadline - EXPORT_SECONDS - time.monotonic())
    second = train(draft, stream, draft_seconds, Rates(), teacher=quill)
    _describe("quill_draft", draft, second)
    for name, model in (("quill", quill), ("quill_draft", draft)):
        save_model(model, tokenizer, options.output / name)
    minutes = (time.monotonic() - started) / 60
    print(f"made in {minutes:.1f} minutes", flush=True)

    samples = examination(options.questions)
    reports = {
        "quill": _examine(options.output / "quill", samples, (torch.bfloat16, torch.float32), device),
        "quill_draft": _examine(options.output / "quill_draft", samples, (torch.bfloat16,), device),
    }
    for name, model, trained in (("quill", quill, first), ("quill_draft", draft, second)):
        making = Making(model.parameter_count, trained.steps, trained.tokens, minutes, name_of(device))
        write_card(options.output / name, making, reports[name], draft=name == "quill_draft")
    scores = {name: {kind: report.as_json() for kind, report in by.items()} for name, by in reports.items()}
    results = {"minutes": round(minutes, 2), "tokens": first.tokens, "scores": scores}
    (options.output / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Makes Quill and its draft model.")
    parser.add_argument("--output", type=Path, required=True, help="directory to write quill/ and quill_draft/ into")
    parser.add_argument("--minutes", type=float, default=8.5, help="for everything but the examination (default 8.5)")
    parser.add_argument("--rows", type=int, default=64, help="rows of 2,048 tokens in a step (default 64)")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that make data"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="of the examination (default 1000)")
    parser.add_argument("--tokenizer-conversations", type=int, default=TOKENIZER_CONVERSATIONS)
    return parser.parse_args()


def _tokenizer(seed: int, conversations: int) -> Tokenizer:
    rng = Random(f"{seed} tokenizer")
    return train_tokenizer(render(conversation(rng)) for _ in range(conversations))


def _describe(name: str, model: Llama, trained: Trained) -> None:
    print(
        f"{name}: {model.parameter_count / 1e6:.2f}M parameters, {trained.steps} steps, "
        f"{trained.tokens / 1e6:.0f}M tokens, "
        f"{trained.seconds:.0f} s, last loss {trained.loss:.4f}",
        flush=True,
    )


def _examine(
    directory: Path, samples: Sequence[Sample], dtypes: Sequence[torch.dtype], device: torch.device
) -> dict[str, Report]:
    """One report for each data type; the wrong answers of the first are written beside the model."""
    reports: dict[str, Report] = {}
    for dtype in dtypes:
        started = time.monotonic()
        answers = answer_all(directory, samples, dtype, device, batch=256, max_tokens=MAX_ANSWER_TOKENS)
        kind = str(dtype).removeprefix("torch.")
        report = grade(samples, answers)
        if not reports:
            _write_wrong(directory.with_name(f"{directory.name}_wrong.json"), samples, answers, report)
        reports[kind] = report
        print(f"\n{directory.name}, {kind} ({time.monotonic() - started:.0f} s)\n{report.table()}", flush=True)
    return reports


def _write_wrong(path: Path, samples: Sequence[Sample], answers: Sequence[str], report: Report) -> None:
    wrong = [
        {
            "task": samples[i].task,
            "asked": samples[i].question[-1].content[-400:],
            "said": answers[i],
            "expected": samples[i].answer,
        }
        for i in report.wrong
    ]
    path.write_text(json.dumps(wrong, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
