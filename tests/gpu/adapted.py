"""What an engine on a card says with adapters, beside PEFT, which reads prompt and answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from quire import LLM
from tests.checkpoints import make_tiny
from tests.models.divisible import DIVISIBLE
from tests.offline.test_lora import Stage

TOKENS = 16


def stages(factory: pytest.TempPathFactory, kinds: dict[str, dict[str, Any]]) -> Callable[[str], Stage]:
    """By case of DIVISIBLE: adapters of these kinds, and PEFT's model of them."""

    @cache
    def of(case: str) -> Stage:
        directory = factory.mktemp("adapters")
        return Stage(directory, make_tiny(directory / "model", **DIVISIBLE[case]), kinds, start=False)

    return of


def answers(
    stage: Stage, llm: LLM, prompts: Sequence[list[int]], names: Sequence[str | None], count: int = TOKENS
) -> Iterator[tuple[str | None, list[int], Tensor, list[Any]]]:
    """`count` tokens of each prompt, greedily: its adapter's name, the tokens, PEFT's log probabilities [count, vocab]
    there, and what the engine says of the likeliest."""
    outputs = stage.generate(list(prompts), list(names), llm, max_tokens=count, logprobs=2)
    for prompt, name, output in zip(prompts, names, outputs, strict=True):
        (choice,) = output.outputs
        tokens = list(choice.token_ids)
        logits: Tensor = stage.reference.logits(prompt + tokens, name)[len(prompt) - 1 : -1]
        yield name, tokens, logits.log_softmax(-1), choice.logprobs


def mean_errors(
    stage: Stage, llm: LLM, prompts: Sequence[list[int]], names: Sequence[str | None]
) -> dict[str | None, float]:
    """How far log probabilities of the likeliest tokens are from PEFT's on average, by adapter."""
    errors: dict[str | None, list[float]] = defaultdict(list)
    for name, _, rows, reported in answers(stage, llm, prompts, names):
        for row, entries in zip(rows, reported, strict=True):
            errors[name] += [abs(entry.logprob - float(row[token])) for token, entry in entries.items()]
    return {name: sum(found) / len(found) for name, found in errors.items()}
