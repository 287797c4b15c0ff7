"""Sessions of coding agents, made from a seed: prompts that grow by a reply and a tool's result in each turn.

What a server answers is not what the next prompt goes on with: each reply is drawn in advance, so that one seed makes
the same prompts for every server.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from quire.errors import ConfigError
from quire.tools.bench.datasets import Sample, Tokens

_SHAPE = 2.0
"""Of the gamma distributions of lengths and pauses: most are short, some are several times the mean."""
_FEWEST = 4
"""Fewest tokens that a turn adds: a reply and a result."""


@dataclass(frozen=True)
class SessionOptions:
    """What sessions are like. By default as coding agents' are: 131 tokens go in for each that comes out."""

    num_sessions: int = 8
    """How many sessions, all of them new."""
    first_len: int = 12_000
    """Tokens of a session's first prompt: instructions, tools and the task."""
    context_len: int = 80_000
    """Tokens of a session's last prompt, at most."""
    turn_len: int = 2_200
    """Mean number of tokens that a turn adds: the reply of the turn before, and what the tool gave."""
    output_len: int = 350
    """Mean number of tokens of a reply."""
    tool_time: float = 2.0
    """Mean pause before a turn, in seconds, in which the client's tools run."""

    def __post_init__(self) -> None:
        least = {"num_sessions": 1, "first_len": 1, "turn_len": _FEWEST, "output_len": 1, "tool_time": 0}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {lowest}.", param=name)
        if self.context_len < self.first_len:
            raise ConfigError("--context-len must not be below --first-len.", param="context_len")


@dataclass(frozen=True)
class Turn:
    """One request: its prompt's length in tokens, those of the answer, and the seconds that the client waits before."""

    prompt_len: int
    output_len: int
    pause: float


@dataclass(frozen=True)
class Session:
    """A session: the tokens of its last prompt, of which each turn's is the beginning."""

    tokens: Sequence[int]
    turns: Sequence[Turn]

    def prompts(self) -> Iterator[Sample]:
        """Each turn's prompt as token ids."""
        for turn in self.turns:
            yield Sample(list(self.tokens[: turn.prompt_len]), turn.output_len)

    def conversations(self, tokens: Tokens) -> Iterator[Sample]:
        """Each turn's prompt as texts of a conversation: of the user, the model, the user, and so on."""
        texts: list[str] = []
        end = reply = 0
        for turn in self.turns:
            if end:
                texts.append(tokens.decode(list(self.tokens[end : end + reply])))
            texts.append(tokens.decode(list(self.tokens[end + reply : turn.prompt_len])))
            end, reply = turn.prompt_len, turn.output_len
            yield Sample(texts[0], turn.output_len, tuple(texts[1:]))


def make_sessions(options: SessionOptions, tokens: Tokens, rng: random.Random) -> list[Session]:
    """Sessions whose lengths, pauses and tokens come from `rng`."""
    return [_session(options, tokens, rng) for _ in range(options.num_sessions)]


def _session(options: SessionOptions, tokens: Tokens, rng: random.Random) -> Session:
    def drawn(mean: float) -> float:
        return rng.gammavariate(_SHAPE, mean / _SHAPE) if mean else 0.0

    lengths = [options.first_len]
    while (longer := lengths[-1] + max(_FEWEST, round(drawn(options.turn_len)))) <= options.context_len:
        lengths.append(longer)
    added = [after - before for before, after in pairwise(lengths)] + [options.turn_len]
    outputs = [min(max(1, round(drawn(options.output_len))), most - 1) for most in added]
    turns = [
        Turn(length, output, drawn(options.tool_time) if number else 0.0)
        for number, (length, output) in enumerate(zip(lengths, outputs, strict=True))
    ]
    return Session(tokens.random_ids(lengths[-1], rng), turns)
