"""Runs schedules on engines, and tells what came out and what happened on the way."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

from quire import LLMEngine
from quire.outputs import CompletionOutput, RequestOutput
from tests.equivalence import engines
from tests.equivalence.engines import KINDS, Drafting, Kind
from tests.equivalence.requests import GRAMMARS, Request, random_requests

MUST_HAPPEN = (
    "preempted by swap", "preempted by recompute", "chunked prompts", "cached tokens", "forks", "drafts",
    "drafts accepted", "masked tokens", "drafts beside masks", "log probabilities", "prompt log probabilities",
    "ends: length", "ends: stop token", "ends: stop string", "ends: eos", "ends: repetition", "aborted", "adapters",
    "penalties", "biases", "bad words", "min_tokens", "allowed tokens", "logits processors",
)  # fmt: skip
"""What many schedules together exercise."""


TOLERANCE = 2e-3
"""How far the sums of a schedule's log probabilities may be apart. Sums of fp32 depend on what else is in a step."""


@dataclass(frozen=True)
class Outcome:
    """What a schedule brought; its text is a line of what is printed.

    Attributes:
        seed: Of the schedule.
        kind: The engine that it ran on.
        digest: Of each request's tokens, texts, reasons why it ended, and tokens with log probabilities.
        logprobs: The sum of all log probabilities, of which neighbours count differently.
    """

    seed: int
    kind: str
    digest: str
    logprobs: float

    def __str__(self) -> str:
        return f"{self.seed} {self.kind} {self.digest} {self.logprobs:.4f}"

    @classmethod
    def parse(cls, line: str) -> Outcome:
        """From the text."""
        seed, kind, digest, logprobs = line.split()
        return cls(int(seed), kind, digest, float(logprobs))

    def equals(self, other: Outcome) -> bool:
        """Whether the other one brought equal tokens, and log probabilities that are as good as equal."""
        same = (self.seed, self.kind, self.digest) == (other.seed, other.kind, other.digest)
        return same and abs(self.logprobs - other.logprobs) <= TOLERANCE


class Schedules:
    """Engines of all kinds that stay alive from schedule to schedule; each is started when it is first needed.

    Args:
        models: The directory of `make_models`.

    Attributes:
        happened: How often what has happened.
    """

    def __init__(self, models: Path) -> None:
        self._models = models
        self._drafting = Drafting()
        self._patch = self._drafting.installed()
        self._engines: dict[tuple[str, bool], LLMEngine] = {}
        self.happened: Counter[str] = Counter()

    def __enter__(self) -> Schedules:
        self._patch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for engine in self._engines.values():
            engine.close()
        self._patch.__exit__(*error)

    def run(self, seed: int) -> Outcome:
        """Run a schedule on the engine that its seed names."""
        kind = KINDS[seed % len(KINDS)]
        self._drafting.begin(seed, kind)
        requests = random_requests(seed, kind)
        outputs = Run(self._engine(kind), self._models, self.happened).run(requests)
        return _outcome(seed, kind, requests, outputs)

    def run_alone(self, seed: int) -> Outcome:
        """Run each request of the schedule by itself, where nothing is preempted and nothing drafted."""
        kind = KINDS[seed % len(KINDS)]
        requests = random_requests(seed, kind)
        engine = self._engine(kind, roomy=True)
        outputs = [Run(engine, self._models, Counter()).run([request])[0] for request in requests]
        return _outcome(seed, kind, requests, outputs)

    def _engine(self, kind: Kind, *, roomy: bool = False) -> LLMEngine:
        place = (f"{kind.model} {kind.answers}" if roomy else kind.name, roomy)
        if place not in self._engines:
            make = engines.start_roomy if roomy else engines.start
            self._engines[place] = engine = make(kind, self._models)
            _warm_up(engine)
        return self._engines[place]


class Run:
    """One schedule on an engine.

    Args:
        engine: Nothing is open in it.
        models: Where adapters are.
        happened: Counts what happens.
    """

    def __init__(self, engine: LLMEngine, models: Path, happened: Counter[str]) -> None:
        self._engine, self._models, self._happened = engine, models, happened
        self._outputs: dict[str, RequestOutput] = {}
        self._client = engine._local.client

    def run(self, requests: list[Request]) -> list[RequestOutput]:
        """The last output of each request."""
        before = self._client.heartbeat().load
        waiting, until_next = list(enumerate(requests)), requests[0].after
        self._free_host_blocks = [self._client.counts()["free_host_blocks"]]
        while waiting or self._engine.has_unfinished_requests():
            while waiting and (until_next <= 0 or not self._engine.has_unfinished_requests()):
                self._add(*waiting.pop(0))
                until_next = waiting[0][1].after if waiting else 0
            self._step(requests)
            until_next -= 1
        self._finish_steps()
        self._count(requests, before)
        return [self._outputs[str(number)] for number in range(len(requests))]

    def _add(self, number: int, request: Request) -> None:
        adapter = None if request.adapter is None else engines.adapter(request.adapter, self._models)
        self._engine.add_request(
            str(number), request.prompt, request.sampling, lora_request=adapter, priority=request.priority
        )

    def _step(self, requests: list[Request]) -> None:
        for output in self._engine.step():
            self._outputs[output.request_id] = output
            limit = requests[int(output.request_id)].abort_at
            if limit is not None and not output.finished and len(output.outputs[0].token_ids) >= limit:
                self._engine.abort_request(output.request_id)
                self._happened["aborted"] += 1
        self._free_host_blocks.append(self._client.counts()["free_host_blocks"])

    def _finish_steps(self) -> None:
        """Process what is in flight; then everything is free again, and nothing is cached for the next schedule."""
        for _ in range(1_000):
            counts = self._client.counts()
            if counts["requests"] == counts["in_flight"] == 0:
                break
            self._client.receive(0.0)
        for free, of in (("free_blocks", "blocks"), ("free_slots", "slots"), ("free_host_blocks", "host_blocks")):
            assert counts[free] == counts[of], counts
        _reset_prefix_cache(self._engine)

    def _count(self, requests: list[Request], before: Any) -> None:
        load, happened = self._client.heartbeat().load, self._happened
        preempted = load.preemptions - before.preemptions
        swapped = min(preempted, sum(later < earlier for earlier, later in pairwise(self._free_host_blocks)))
        happened["preempted by swap"] += swapped
        happened["preempted by recompute"] += preempted - swapped
        drafts = load.draft_tokens - before.draft_tokens
        happened["drafts"] += drafts
        happened["drafts accepted"] += sum(load.accepted_drafts) - sum(before.accepted_drafts)
        happened["drafts beside masks"] += drafts if any(each.sampling.structured_outputs for each in requests) else 0
        for number, request in enumerate(requests):
            self._count_one(request, self._outputs[str(number)])

    def _count_one(self, request: Request, output: RequestOutput) -> None:
        asked, happened = request.sampling, self._happened
        tokens = sum(len(each.token_ids) for each in output.outputs)
        happened["requests"] += 1
        happened["tokens"] += tokens
        happened["forks"] += asked.n - 1
        happened["chunked prompts"] += len(output.prompt_token_ids) > engines.LIMITS["max_num_batched_tokens"]
        happened["cached tokens"] += output.num_cached_tokens
        happened["masked tokens"] += tokens if asked.structured_outputs else 0
        happened["log probabilities"] += tokens if asked.num_reported is not None else 0
        happened["prompt log probabilities"] += len(output.prompt_logprobs or ())
        happened["adapters"] += request.adapter is not None
        happened["penalties"] += asked.penalizes
        happened["biases"] += bool(asked.logit_bias)
        happened["bad words"] += bool(asked.bad_words)
        happened["logits processors"] += bool(asked.extra_args)
        happened["min_tokens"] += bool(asked.min_tokens)
        happened["allowed tokens"] += bool(asked.allowed_token_ids)
        for each in output.outputs:
            if each.finish_reason == "stop":
                by = {str: "stop string", int: "stop token"}.get(type(each.stop_reason), "eos")
                happened[f"ends: {by}"] += 1
            elif each.finish_reason is not None:
                happened[f"ends: {each.finish_reason}"] += 1


def _warm_up(engine: LLMEngine) -> None:
    """Have all grammars compiled; else a sequence begins when its grammar happens to be."""
    from quire import SamplingParams, StructuredOutputsParams

    for number, grammar in enumerate(GRAMMARS):
        params = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(**grammar))
        engine.add_request(str(number), [3], params)
        while engine.has_unfinished_requests():
            engine.step()


def _reset_prefix_cache(engine: LLMEngine) -> None:
    from quire.foundation.messages.from_engine import Done
    from quire.foundation.messages.to_engine import Control

    engine._local.client.send(Control(0, "reset_prefix_cache"))
    while not isinstance(engine._local.client.receive(None), Done):
        pass


def _outcome(seed: int, kind: Kind, requests: list[Request], outputs: list[RequestOutput]) -> Outcome:
    answers, scores = [], []
    for request, output in zip(requests, outputs, strict=True):
        _check(request, output)
        reported = [output.prompt_logprobs or ()]
        for each in output.outputs[: None if request.abort_at is None else 1]:
            answers.append(_answer(each, request.abort_at))
            reported.append((each.logprobs or [])[: request.abort_at])
        entries = [entry for some in reported for entry in some if entry is not None]
        answers.append([sorted(entry) for entry in entries])
        scores += [max(score.logprob, -99.0) for entry in entries for _, score in sorted(entry.items())]
    total = sum((1 + number % 5) * score for number, score in enumerate(scores))
    return Outcome(seed, kind.name, sha256(repr(answers).encode()).hexdigest()[:16], total)


def _answer(output: CompletionOutput, abort_at: int | None) -> Any:
    """What a sequence brought; of one that is aborted as much as is certain, for more may have come with drafts."""
    if abort_at is not None:
        return output.token_ids[:abort_at]
    if output.finish_reason == "error":  # no token was allowed; those just before it are lost if they were drafted
        return "error"
    return output.token_ids, output.text, output.finish_reason, output.stop_reason


def _check(request: Request, output: RequestOutput) -> None:
    """What the request asked for is there, whatever another engine would have said."""
    asked = request.sampling
    for each in output.outputs:
        assert len(each.token_ids) <= (asked.max_tokens or 0)
        constraint = asked.structured_outputs
        if constraint is not None and each.finish_reason == "stop" and each.stop_reason is None:
            if constraint.choice is not None:
                assert each.text in constraint.choice
            elif constraint.regex is not None:
                assert re.fullmatch(constraint.regex, each.text), each.text
        if asked.allowed_token_ids:
            assert set(each.token_ids) <= {*asked.allowed_token_ids}
