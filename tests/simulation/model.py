"""The simulated model: what an engine has to bring for a request, computed from the request alone.

Tokens follow from everything before them, from the seed and from the mask, so a lost, repeated, stale or foreign token
changes all that come after it. The executor reads the tokens before from the blocks; `expected_output` does not.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.engine.token_bitmasks import Drafts, Masks, TokenBitmaskSource
from quire.errors import GenerationError, QuireError
from quire.foundation.messages.from_engine import EndReason, PoolingInfo
from quire.foundation.messages.to_engine import Add
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.scheduling.scheduler.request import Request
from tests.engine.harness import HashMasker
from tests.executor.fake import allowed, hash_token, next_state, seeded_counter, state_of, stateful_counter
from tests.executor.fake_pooling import fake_vector
from tests.simulation.world import World

VOCAB_SIZE = 128
POISON = VOCAB_SIZE - 1
"""A prompt with this token ends the engine; the model never brings it."""
END_OF_SEQUENCE = 5
GRAMMAR = "half of the tokens"
BROKEN_GRAMMAR = "none that can be followed"


def sample(history: Sequence[int], counter: int, vocab_size: int) -> int:
    """The model: a checksum of what it sees."""
    return hash_token(history, counter, vocab_size - 1)


def mask(tokens: Sequence[int]) -> bytes:
    """The tokens that the grammar allows after these: half of all, but never the poison."""
    bits = bytearray(HashMasker.mask(tokens, VOCAB_SIZE))
    bits[POISON // 8] &= ~(1 << POISON % 8) & 0xFF
    return bytes(bits)


def is_complete(tokens: Sequence[int], prompt_len: int) -> bool:
    """Whether the grammar lets nothing follow."""
    return len(tokens) > prompt_len and zlib.crc32(array("q", tokens).tobytes()) % 29 == 0


class Expected(NamedTuple):
    """What a sequence has to bring, if nothing ends it earlier."""

    tokens: list[int]
    reason: EndReason


def expected_output(
    prompt: Sequence[int],
    seed: int,
    sampling: SamplingParams,
    stop_ids: Sequence[int],
    masked: bool,
    first_visible: Callable[[int], int],
    has_states: bool = False,
) -> Expected:
    """The output of one sequence.

    Args:
        prompt: Token ids.
        seed: Of this sequence.
        sampling: As it was asked for, with `max_tokens`.
        stop_ids: See Add.
        masked: Whether a grammar is followed.
        first_visible: The first position that the model sees from a position.
        has_states: Whether the model has a state besides.
    """
    history, state = list(prompt), state_of(prompt)
    for num_sampled in range(sampling.max_tokens or 0):
        if masked and is_complete(history, len(prompt)):
            return Expected(history[len(prompt) :], "stop")
        seen = history[first_visible(len(history) - 1) :]
        counter = seeded_counter(seed, num_sampled)
        token = sample(seen, stateful_counter(counter, state) if has_states else counter, VOCAB_SIZE)
        history.append(allowed(token, mask(history), VOCAB_SIZE) if masked else token)
        state = next_state(state, history[-1])
        if history[-1] in stop_ids and num_sampled + 1 >= sampling.min_tokens:
            return Expected(history[len(prompt) :], "stop")
    return Expected(history[len(prompt) :], "length")


POOLING = PoolingInfo(["embed", "token_embed"], generates=True, dim=4)


def pools_from_cache(params: PoolingParams) -> bool:
    """Whether what is cached of a text's beginning serves."""
    return params.task == "embed"


def expected_vector(text: Sequence[int], params: PoolingParams, skip: int, first: int) -> npt.NDArray[np.float32]:
    """The vector of a text, of which `skip` tokens are not pooled, and whose last token sees those from `first` on:
    [dim], or [tokens, dim]."""
    if params.per_token:
        return np.stack([fake_vector(text[: end + 1], params, POOLING) for end in range(len(text))])
    return fake_vector(text[first:], params, POOLING, skip)


class SimulatedGrammars(TokenBitmaskSource):
    """Masks of the requests that have a grammar; some take a while to prepare, some are asked for and waited for.

    Args:
        world: Gives the time.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.random("grammars")
        self._preparing: dict[int, tuple[float, str]] = {}
        self._held: set[int] = set()
        self._takes_s = 0.0
        self._asked: list[Masks] = []

    @property
    def num_held(self) -> int:
        """Sequences that it knows."""
        return len(self._held)

    def wants(self, message: Add) -> bool:
        return bool(message.grammar)

    def prepare(self, message: Add) -> bool:
        self._held.add(message.id)
        if message.fork_of is None:  # the grammar of all sequences of a prompt is the same, and is compiled once
            self._takes_s = self._random.choice((0.0, 0.0, 0.01, 0.5))
        takes = self._takes_s
        error = "The grammar is broken." if message.grammar == BROKEN_GRAMMAR else ""
        if not takes and not error:
            return True
        self._preparing[message.id] = (self._world.now() + takes, error)
        return False

    def prepared(self) -> list[tuple[int, QuireError | None]]:
        due: list[tuple[int, QuireError | None]] = [
            (number, GenerationError(error) if error else None)
            for number, (when, error) in self._preparing.items()
            if when <= self._world.now()
        ]
        for number, _ in due:
            del self._preparing[number]
        return due

    def ask(self, requests: Sequence[Request], drafts: Drafts) -> bool:
        assert not self._asked, "asked twice"
        self._asked = [
            None if is_complete(request.tokens, request.add.prompt_len) else [mask(request.tokens)]
            for request in requests
        ]
        return self._random.random() < 0.5

    def bits(self) -> list[Masks]:
        asked, self._asked = self._asked, []
        return asked

    def forget(self, request_id: int) -> None:
        self._preparing.pop(request_id, None)
        self._held.discard(request_id)

    def close(self) -> None:
        pass
