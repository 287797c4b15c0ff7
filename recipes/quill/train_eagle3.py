"""Makes the EAGLE-3 head of a Quill that train.py has made, in one command.

    python recipes/quill/train_eagle3.py --output DIR [--model quire/builtin/quill] [--minutes 4]

Writes DIR/quill_eagle3, a head in the layout of published ones, with its card.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from quill.card import Making, name_of, write_head_card
from quill.checkpoint import load_model, save_head
from quill.corpus import batches
from quill.eagle3 import DRAFTS, QUILL_EAGLE3, Head, frequent_tokens
from quill.eagle3_training import agreement, train_head
from quill.training_loop import Rates

COUNTED_BATCHES = 32
"""By which the tokens are chosen that the head can propose."""
EXAMINED_BATCHES = 8
NAME = "quill_eagle3"


def main() -> None:
    options = _options()
    started = time.monotonic()
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_model(options.model)
    model.to(device).requires_grad_(False)
    stream = batches(tokenizer, options.rows, options.seed, options.workers, device)
    counted = [next(stream) for _ in range(min(COUNTED_BATCHES, options.steps or COUNTED_BATCHES))]
    tokens = frequent_tokens(counted, model.shape.vocab_size, QUILL_EAGLE3.draft_vocab_size)
    head = Head(QUILL_EAGLE3, tokens).to(device)
    head.start_from(model)
    print(f"{head.parameter_count / 1e6:.2f}M parameters, {time.monotonic() - started:.1f} s", flush=True)

    seconds = 60 * options.minutes - (time.monotonic() - started)
    trained = train_head(head, model, stream, seconds, Rates(embeddings=0.001, others=0.004), options.steps)
    minutes = (time.monotonic() - started) / 60
    rates = agreement(head, model, stream, min(EXAMINED_BATCHES, options.steps or EXAMINED_BATCHES), DRAFTS)
    print(
        f"{trained.steps} steps, {trained.tokens / 1e6:.0f}M tokens, {trained.seconds:.0f} s, last loss "
        f"{trained.loss:.4f}; drafts that agree: {', '.join(f'{rate:.3f}' for rate in rates)}",
        flush=True,
    )
    directory = options.output / NAME
    save_head(head, directory)
    making = Making(head.parameter_count, trained.steps, trained.tokens, minutes, name_of(device))
    write_head_card(directory, making, QUILL_EAGLE3.draft_vocab_size, rates, EXAMINED_BATCHES)
    print(f"made in {minutes:.1f} minutes: {directory}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Makes Quill's EAGLE-3 head.")
    parser.add_argument("--output", type=Path, required=True, help=f"directory to write {NAME}/ into")
    parser.add_argument(
        "--model", type=Path, default=Path(__file__).parents[2] / "quire/builtin/quill", help="Quill's directory"
    )
    parser.add_argument("--minutes", type=float, default=4.0, help="for everything but the last batches (default 4)")
    parser.add_argument("--steps", type=int, default=0, help="most steps of training; 0: as many as there is time for")
    parser.add_argument("--rows", type=int, default=32, help="rows of 2,048 tokens in a step (default 32)")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that make data"
    )
    parser.add_argument("--seed", type=int, default=2, help="of the data and the weights (train.py has 1)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
