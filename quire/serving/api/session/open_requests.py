"""The requests whose sequences engines still run: what was asked, what it has brought, and what becomes of it when an
engine dies.

The next engine gets every open sequence together with the tokens that are known. Sampling depends on nothing but the
seed and the sampled tokens, so the output is the one that the first engine would have brought. A prompt that was in
flight at two deaths runs alone there until it is past the token at which the engine died (`Add.alone`); if it kills the
engine again, its request fails, and all others go on.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from quire.foundation.messages.to_engine import Add, Fork
from quire.serving.api.session.output_collector import OutputCollector
from quire.text.deltas import SequenceDelta

logger = logging.getLogger(__name__)

PROVEN_TOKENS = 4
"""Tokens after which a sequence is past the one at which the last engine died: more than plans in flight bring."""


class OpenSequence:
    """A sequence that has not ended, with all that another engine needs to go on.

    Attributes:
        generated: Tokens that engines have sent.
        num_prompt_logprobs: How many of the prompt's log probabilities were sent.
        sent: Whether the present engine knows the sequence.
        engines: How many engines have known it.
        deaths: How many engines died while it was in flight, since it last got past the token of such a death.
    """

    __slots__ = (
        "_known", "_repeated", "add", "collector", "deaths", "engine", "engines", "generated", "num_prompt_logprobs",
        "sent",
    )  # fmt: skip

    def __init__(self, add: Add, collector: OutputCollector, engine: int) -> None:
        self.add = add
        self.collector = collector
        self.engine = engine
        self.generated = array("i")
        self.num_prompt_logprobs = 0
        self.sent = False
        self.engines = 0
        self.deaths = 0
        self._known = 0  # tokens that the present engine was told
        self._repeated = 0  # prompt log probabilities that it brings a second time

    @property
    def alone(self) -> bool:
        """Whether the next engine has to run the sequence alone, or the present one does."""
        return self.deaths >= 2

    def mark_sent(self) -> None:
        """Note that an engine gets the sequence as it is now."""
        self.sent = True
        self.engines += 1
        self._known = len(self.generated)
        self._repeated = self.num_prompt_logprobs

    def record(self, delta: SequenceDelta) -> None:
        """Take over what the engine has sent, without what an earlier engine had sent already."""
        if self.engines > 1:
            repeated = min(self._repeated, len(delta.prompt_logprobs))
            self._repeated -= repeated
            del delta.prompt_logprobs[:repeated]
            if self.generated:
                delta.cached_tokens = 0  # said with the first token
        self.generated.extend(delta.tokens)
        if len(self.generated) - self._known >= PROVEN_TOKENS:
            self.deaths = 0
        self.num_prompt_logprobs += len(delta.prompt_logprobs)


class OpenRequests:
    """All sequences that have not ended."""

    def __init__(self) -> None:
        self._sequences: dict[int, OpenSequence] = {}
        self._open_of_request: dict[int, int] = {}  # open sequences, by the id of the collector of the first part
        self._num_kept_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def num_requests(self) -> int:
        """How many requests of clients have open sequences."""
        return len(self._open_of_request)

    def get(self, sequence: int) -> OpenSequence | None:
        """A sequence by its id; None when nobody wants it any more."""
        return self._sequences.get(sequence)

    def of_engine(self, engine: int) -> list[OpenSequence]:
        """Sequences of one engine, in the order of arrival."""
        return [sequence for sequence in self._sequences.values() if sequence.engine == engine]

    def engine_died(self, engine: int) -> None:
        """Note that this engine knows no sequence any more."""
        for sequence in self.of_engine(engine):
            sequence.sent = False

    def unsent(self, engine: int) -> list[OpenSequence]:
        """Sequences that this engine does not know, in the order of arrival."""
        return [sequence for sequence in self.of_engine(engine) if not sequence.sent]

    def unbegun(self, engine: int, in_flight: Collection[int]) -> list[list[OpenSequence]]:
        """Sequences that this engine has only kept waiting, by prompt: nothing of their requests has begun."""
        sequences, working = self.of_engine(engine), set(in_flight)
        begun = {id(each.collector) for each in sequences if each.add.id in working or each.generated}
        prompts: dict[int, list[OpenSequence]] = {}
        for each in sequences:
            if id(each.collector) not in begun:
                prompts.setdefault(each.add.prompt_id, []).append(each)
        return list(prompts.values())

    def collectors(self, engine: int | None = None) -> list[OutputCollector]:
        """The collector of each request; with a number, of each request that this engine has a part in."""
        sequences = self._sequences.values() if engine is None else self.of_engine(engine)
        return list({id(sequence.collector): sequence.collector for sequence in sequences}.values())

    def add(self, collector: OutputCollector, engines: Sequence[int]) -> None:
        """Open all sequences of a request, each on the engine of this number; forks go with their first."""
        self._idle.clear()
        request = id(collector.part_of or collector)
        self._open_of_request[request] = self._open_of_request.get(request, 0) + len(collector.adds)
        for add, engine in zip(collector.adds, engines, strict=True):
            self._sequences[add.id] = OpenSequence(add, collector, engine)

    def remove(self, sequence: int) -> None:
        """Close a sequence that has ended, or is not wanted any more."""
        collector = self._sequences.pop(sequence).collector
        request = id(collector.part_of or collector)
        self._open_of_request[request] -= 1
        if not self._open_of_request[request]:
            del self._open_of_request[request]
        self._update_idle()

    @contextmanager
    def keep_open(self) -> Iterator[None]:
        """A context in which `wait_idle` waits, even while no sequence runs."""
        self._num_kept_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_kept_open -= 1
            self._update_idle()

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    def _update_idle(self) -> None:
        if not self._sequences and not self._num_kept_open:
            self._idle.set()


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
    """One Add for each prompt of these sequences, which count as sent. Prompts that run alone come first."""
    prompts: dict[int, list[OpenSequence]] = {}
    for sequence in sequences:
        prompts.setdefault(sequence.add.prompt_id, []).append(sequence)
    return sorted(map(_replay_add, prompts.values()), key=lambda add: not add.alone)


def _replay_add(sequences: list[OpenSequence]) -> Add:
    """The Add of one prompt: the first of its sequences carries the others."""
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
