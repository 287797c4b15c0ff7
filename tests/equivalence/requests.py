"""Random requests, and when they come: what a seed says, whichever engine runs it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from quire import SamplingParams, StructuredOutputsParams
from quire.sampling_params import RepetitionDetectionParams, RequestOutputKind
from tests.checkpoints import VOCAB_SIZE
from tests.equivalence.engines import ADAPTERS, Kind

MAX_PROMPT, MAX_OUTPUT = 56, 24
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "(ab|cd){2,9}-[0-9]{2}"},
    {"regex": "[a-f]+( [a-f]+)*"},
    {"choice": ["to the left of the house", "to the right of the house"]},
    {"choice": ["yes", "no", "maybe"]},
    {"json": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
              "additionalProperties": False}},
)  # fmt: skip
TELLING = (
    "abcdab-12 cdcdab-34 a b c d a b c",
    "to the left of the house, to the right of the house, to",
    'yes, no, maybe, {"on": true} {"on": false}',
)
"""Prompts that have much of what the grammars allow, so that drafts are found in them."""

_FORBIDDING = {"bad_words", "extra_args", "min_tokens"}


@dataclass(frozen=True)
class Request:
    """One request of a schedule.

    Attributes:
        prompt: As `add_request` takes it.
        sampling: Its parameters; always with a seed, so that its tokens do not depend on what else runs.
        after: So many steps pass between the request before and this one.
        abort_at: It is aborted once it has so many tokens; None: it is not.
        adapter: One of ADAPTERS.
        priority: Lower goes first.
    """

    prompt: Any
    sampling: SamplingParams
    after: int
    abort_at: int | None = None
    adapter: str | None = None
    priority: int = 0


def random_requests(seed: int, kind: Kind) -> list[Request]:
    """A schedule: the requests of a seed, in the order in which they come."""
    luck = random.Random(f"{seed} {kind.name}")
    alphabet = luck.choice((range(3, VOCAB_SIZE), range(3, 9)))
    stems = [_tokens(luck, range(3, VOCAB_SIZE), luck.randint(4, 34)) for _ in range(2)]
    requests = [_request(luck, kind, alphabet, stems) for _ in range(luck.randint(2, 8))]
    if luck.random() < 0.2:
        requests.append(luck.choice(requests))  # another's output tells all of this one's
    return requests


def _request(luck: random.Random, kind: Kind, alphabet: range, stems: list[list[int]]) -> Request:
    stem = luck.choice(stems) if luck.random() < 0.5 else []
    prompt: Any = {"prompt_token_ids": [*stem, *_tokens(luck, alphabet, luck.randint(1, MAX_PROMPT - len(stem)))]}
    salt = {"cache_salt": luck.choice("xy")} if luck.random() < 0.1 else {}
    abort_at = luck.randint(1, 8) if luck.random() < 0.08 else None
    asked = _sampling(luck)
    if kind.has_processors and luck.random() < 0.5:
        asked["extra_args"] = {"not_the_last": luck.randint(1, 3)}
    if abort_at is not None:
        asked["output_kind"] = RequestOutputKind.CUMULATIVE
        asked.pop("prompt_logprobs", None)
    if asked.keys() & {"structured_outputs", "allowed_token_ids"} and asked.keys() & _FORBIDDING:
        # No token may be left. What has come of a request by the time it fails depends on the drafts.
        asked.pop("prompt_logprobs", None)
        abort_at = None
    if "structured_outputs" in asked and luck.random() < 0.6:
        prompt = {"prompt": luck.choice(TELLING)}
    return Request(
        prompt | salt,
        SamplingParams(**asked),
        luck.choice((0, 0, 0, 1, 2, 5)),
        abort_at,
        luck.choice(ADAPTERS) if kind.has_adapters and luck.random() < 0.7 else None,
        luck.randint(-1, 1) if kind.has_priorities else 0,
    )


def _sampling(luck: random.Random) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "max_tokens": luck.randint(1, MAX_OUTPUT),
        "ignore_eos": luck.random() < 0.7,
        "seed": luck.getrandbits(32),
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    for chance, some in ((1.0, _distribution), (0.3, _logits), (0.35, _reports), (0.45, _ends)):
        if luck.random() < chance:
            asked |= some(luck, asked)
    if luck.random() < 0.15:
        asked["structured_outputs"] = StructuredOutputsParams(**luck.choice(GRAMMARS))
        asked["max_tokens"] = MAX_OUTPUT
    elif luck.random() < 0.06:
        asked["allowed_token_ids"] = sorted(luck.sample(range(3, VOCAB_SIZE), 5))
        asked.pop("bad_words", None)
    return asked


def _distribution(luck: random.Random, asked: dict[str, Any]) -> dict[str, Any]:
    if luck.random() < 0.4:
        return {"temperature": 0.0}
    made: dict[str, Any] = {"temperature": luck.choice((0.3, 0.7, 1.0, 1.5)), "n": luck.choice((1, 1, 1, 2, 3))}
    for name, values in (("top_p", (0.5, 0.9)), ("top_k", (1, 5, 40)), ("min_p", (0.02, 0.2))):
        if luck.random() < 0.35:
            made[name] = luck.choice(values)
    return made


def _logits(luck: random.Random, asked: dict[str, Any]) -> dict[str, Any]:
    choices: dict[str, Any] = {
        "presence_penalty": luck.uniform(-1, 2),
        "frequency_penalty": luck.uniform(-1, 2),
        "repetition_penalty": luck.uniform(0.8, 1.5),
        "logit_bias": {token: luck.uniform(-4, 4) for token in luck.sample(range(VOCAB_SIZE), 3)},
        "logit_bias ": dict.fromkeys(luck.sample(range(3, VOCAB_SIZE), 2), 40.0),  # which drafts tell
        "bad_words": luck.sample(["the", "fox", "a", "e", "to the", "over"], 3),
    }
    return {name.strip(): choices[name] for name in luck.sample(sorted(choices), luck.randint(1, 3))}


def _reports(luck: random.Random, asked: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if luck.random() < 0.5:
        made["logprobs"] = luck.choice((0, 1, 5))
    elif luck.random() < 0.3:
        made["logprob_token_ids"] = luck.sample(range(VOCAB_SIZE), 3)
    if luck.random() < 0.4:
        made["prompt_logprobs"] = luck.choice((0, 2))
    return made


def _ends(luck: random.Random, asked: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if luck.random() < 0.6:
        made["stop_token_ids"] = luck.sample(range(3, VOCAB_SIZE), 24)
    if luck.random() < 0.4:
        made["min_tokens"] = luck.randint(0, asked["max_tokens"])
    if luck.random() < 0.2:
        made["stop"] = luck.sample(["e", "t", "th", " ", "in"], 2)
        made["include_stop_str_in_output"] = luck.random() < 0.5
    if luck.random() < 0.15:
        made["repetition_detection"] = RepetitionDetectionParams(max_pattern_size=4, min_count=2)
    return made


def _tokens(luck: random.Random, alphabet: range, count: int) -> list[int]:
    return [luck.choice(alphabet) for _ in range(count)]
