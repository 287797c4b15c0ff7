"""Limits on reasoning: once a sequence has spent its budget, its next tokens are those that end the reasoning.

Stands in front of another source of bitmasks, a grammar's say, and narrows what that allows. What a sequence may do
follows from its tokens alone, so it goes on after a preemption or a replay. Knows token ids only.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

from quire.engine.structured_output.grammar_masks import grammar_masks
from quire.engine.token_bitmasks import Drafts, Masks, TokenBitmaskSource
from quire.errors import QuireError
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import Add
from quire.foundation.messages.workers import Bits
from quire.scheduling.scheduler.request import Request

PROMPT_END = 8
"""How many of a prompt's last tokens tell whether it has opened the reasoning: a tag and white space."""
LEAD = 8
"""Reasoning begins among this many tokens of an output, if at all: white space, and what opens it."""


def bitmask_source(config: Config, vocab_size: int) -> ThinkingBudgets | None:
    """Whatever restricts tokens under resolved settings; None where work is on token ids only."""
    grammars = grammar_masks(config, vocab_size)
    return None if grammars is None else ThinkingBudgets(grammars, vocab_size)


class ThinkingBudgets:
    """Bitmasks of sequences with a budget, narrowed from those of another source, `inner`, if that has any."""

    def __init__(self, inner: TokenBitmaskSource, vocab_size: int) -> None:
        self._inner = inner
        self._size = 4 * -(-vocab_size // 32)
        self._any = b"\xff" * self._size
        self._thinking: dict[int, Thinking] = {}
        self._asked: Sequence[Request] = ()
        self._inner_asked: Sequence[Request] = ()
        self._drafts: Drafts = {}

    def wants(self, message: Add) -> bool:
        return message.thinking is not None or self._inner.wants(message)

    def prepare(self, message: Add) -> bool:
        if message.thinking is not None:
            self._thinking[message.id] = Thinking(message)
        return not self._inner.wants(message) or self._inner.prepare(message)

    def prepared(self) -> list[tuple[int, QuireError | None]]:
        return self._inner.prepared()

    def ask(self, requests: Sequence[Request], drafts: Drafts) -> bool:
        self._asked = self._inner_asked = requests
        self._drafts = drafts
        if self._thinking:
            self._inner_asked = [request for request in requests if self._inner.wants(request.add)]
        return not self._inner_asked or self._inner.ask(self._inner_asked, drafts)

    def bits(self) -> Sequence[Masks]:
        if not self._thinking:
            return self._inner.bits()
        inner: dict[int, Masks] = {}
        if self._inner_asked:
            inner = dict(zip((request.id for request in self._inner_asked), self._inner.bits(), strict=True))
        return [
            self._narrowed(request, inner[request.id] if request.id in inner else self._all_open(request))
            for request in self._asked
        ]

    def forget(self, request_id: int) -> None:
        self._thinking.pop(request_id, None)
        self._inner.forget(request_id)

    def close(self) -> None:
        self._inner.close()

    def _all_open(self, request: Request) -> Masks:
        return [self._any] * (1 + len(self._drafts.get(request.id, ())))

    def _narrowed(self, request: Request, allowed: Masks) -> Masks:
        """What the budget leaves of the allowed tokens."""
        thinking = self._thinking.get(request.id)
        if thinking is None or allowed is None or isinstance(allowed, QuireError):
            return allowed
        thinking.read(request.tokens)
        masks = [self._left_by(thinking, allowed[0])]
        if len(allowed) > 1:
            ahead, tokens = copy(thinking), [*request.tokens, *self._drafts[request.id]]
            for number, bits in enumerate(allowed[1:], 1):
                ahead.read(tokens[: len(request.tokens) + number])
                masks.append(self._left_by(ahead, bits))
        return masks

    def _left_by(self, thinking: Thinking, allowed: Bits) -> Bits:
        """What the budget leaves of a bitmask. A grammar goes first: it completes a character that has begun."""
        if (token := thinking.forced) is not None and _has(allowed, token):
            return self._only(token)
        if (token := thinking.forbidden) is not None and _has(allowed, token):
            return _without(allowed, token)
        return allowed

    def _only(self, token: int) -> bytes:
        bits = bytearray(self._size)
        bits[token >> 3] = 1 << (token & 7)
        return bytes(bits)


class Thinking:
    """Where the reasoning of one sequence with a budget is."""

    def __init__(self, message: Add) -> None:
        assert message.thinking is not None
        self._budget = budget = message.thinking
        self._left = budget.tokens
        self._read = self._prompt_len = message.prompt_len
        self._longest = max(len(budget.start), *map(len, budget.ends))
        self._tail: list[int] = []  # the last tokens, of what has begun last
        self._over = False
        self._open = budget.opened
        if self._open is None:
            self._open = _is_open(message.tokens[: message.prompt_len][-PROMPT_END:], budget.start, budget.ends)

    def read(self, tokens: Sequence[int]) -> None:
        """Take in the tokens of the sequence, prompt and output, that are new."""
        for place in range(self._read, len(tokens)):
            self._tail = [*self._tail, tokens[place]][-self._longest :]
            if self._open:
                self._left -= 1
                if any(map(self._ends_with, self._budget.ends)):
                    self._open, self._over, self._tail = False, not self._budget.again, []
            elif not self._over:
                if self._ends_with(self._budget.start):
                    self._open, self._tail = True, []
                elif not self._budget.again:
                    self._over = place + 1 - self._prompt_len >= LEAD + len(self._budget.start)
        self._read = len(tokens)

    @property
    def forced(self) -> int | None:
        """The token that must come: the next one of what ends the reasoning."""
        if not self._open or self._left > 0:
            return None
        end = self._budget.ends[0]
        return end[next(n for n in range(len(end) - 1, -1, -1) if self._ends_with(end[:n]))]

    @property
    def forbidden(self) -> int | None:
        """A token that would open the reasoning again, on a budget that is spent."""
        if self._open or self._over or self._left > 0 or not self._budget.again:
            return None
        first, *others = self._budget.start
        if not others:
            return first
        return others[0] if self._tail[-1:] == [first] else None

    def _ends_with(self, tokens: list[int]) -> bool:
        return not tokens or self._tail[-len(tokens) :] == tokens


def _is_open(tokens: list[int], start: list[int], ends: list[list[int]]) -> bool:
    """Whether the last tag in these tokens opens."""
    for place in range(len(tokens), 0, -1):
        if tokens[:place][-len(start) :] == start:
            return True
        if any(tokens[:place][-len(end) :] == end for end in ends):
            return False
    return False


def _has(bits: Any, token: int) -> bool:
    return bool(bits[token >> 3] >> (token & 7) & 1)


def _without(bits: Bits, token: int) -> bytes:
    left = bytearray(bits)
    left[token >> 3] &= ~(1 << (token & 7))
    return bytes(left) if any(left) else bytes(bits)
