"""Sequences whose engine died, as Adds for the next one: it goes on behind the tokens that are known.

Seed and sampled tokens are all that sampling depends on, so the output is the one that the first engine would have
brought. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from quire.foundation.messages.to_engine import Add, Fork
from quire.serving.api.open_requests import PROVEN_TOKENS, OpenSequence


def replay_adds(sequences: Iterable[OpenSequence]) -> list[Add]:
    """One Add for each prompt, of those of its sequences that are named, which count as sent. Those that run alone come
    first, so that the engine begins with them."""
    prompts: dict[int, list[OpenSequence]] = {}
    for sequence in sequences:
        prompts.setdefault(sequence.add.prompt_id, []).append(sequence)
    return sorted(map(_replay_add, prompts.values()), key=lambda add: not add.alone)


def _replay_add(sequences: list[OpenSequence]) -> Add:
    """The first of those that are left carries the others."""
    first, *others = sequences
    add, sampling = first.add, first.add.sampling
    if sampling.prompt_logprobs is not None and (
        add.fork_of is not None or first.num_prompt_logprobs >= add.prompt_len - 1  # else they would be computed again
    ):
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    replayed = msgspec.structs.replace(
        add,
        tokens=[*add.tokens[: add.prompt_len], *first.generated],
        sampling=sampling,
        forks=[Fork(other.add.id, other.add.seed, other.generated.tolist()) for other in others],
        fork_of=None,
        alone=PROVEN_TOKENS if any(sequence.alone for sequence in sequences) else 0,
    )
    for sequence in sequences:
        sequence.mark_sent()
    return replayed
