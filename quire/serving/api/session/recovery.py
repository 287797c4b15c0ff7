"""What becomes of an engine's open requests when it dies: who is to blame, and what the next engine is sent.

The next engine gets every open sequence behind the tokens that are known. Seed and sampled tokens are all that sampling
depends on, so the output is the one that the first engine would have brought. A prompt that was in flight at two deaths
runs alone there until it is past the token at which the engine died (`Add.alone`); if it kills the engine again, its
request fails, and all others go on. Knows no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import msgspec

from quire.foundation.messages.to_engine import Add, Fork
from quire.serving.api.session.open_requests import PROVEN_TOKENS, OpenRequests, OpenSequence, OutputCollector

logger = logging.getLogger(__name__)


def engine_died(requests: OpenRequests, engine: int, in_flight: Sequence[int]) -> OutputCollector | None:
    """Note that an engine died while it worked on these sequences. Returns the request to blame, if one ran alone."""
    found = [requests.get(number) for number in in_flight]
    sequences = [sequence for sequence in found if sequence is not None]
    blamed = None
    if len(sequences) == len(found) and len({sequence.add.prompt_id for sequence in sequences}) == 1:
        blamed = next((sequence.collector for sequence in sequences if sequence.alone), None)
    for sequence in sequences:
        sequence.deaths += 1
    requests.engine_died(engine)
    if blamed is not None:
        logger.error("A request has stopped the engine again and again, and fails: %s", blamed.adds[0].id)
    return blamed


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
