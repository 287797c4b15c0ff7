"""Runs requests through a real engine on the fake executor, and says what each would have got alone."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.engine.build import ModelRuntimeInfo
from quire.engine.inprocess import InProcessClient
from quire.engine.token_bitmasks import Masks
from quire.errors import GenerationError, QuireError
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import NO_POOLING, Deltas, End, PoolingInfo, Ready
from quire.foundation.messages.to_engine import Add, Fork
from quire.foundation.messages.workers import TokenLogprobs
from quire.pooling_params import NO_SAMPLING, PoolingParams
from quire.runtime.executor.executor import Executor
from quire.sampling_params import SamplingParams
from quire.scheduling.kvcache.cache_groups import FULL_ATTENTION, CacheGroup
from quire.scheduling.scheduler.request import Request
from tests.executor.fake import FakeExecutor, allowed, hash_token


def config(
    *, max_num_seqs: int = 8, max_num_batched_tokens: int = 64, max_model_len: int = 512, **values: object
) -> Config:
    block_size: Any = values.pop("block_size", 16)  # any: a fake executor has no kernels
    made = Config().with_values(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        **values,
    )
    return replace(made, cache=replace(made.cache, block_size=block_size))


def add(
    number: int,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    prompt_len: int | None = None,
    stop_ids: Sequence[int] = (),
    arrival: float = 0.0,
    priority: int = 0,
    cache_salt: str = "",
    forks: Sequence[int] = (),
    fork_of: int | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    deadline: float | None = None,
    tenant: str = "",
    alone: int = 0,
    **sampling: object,
) -> Add:
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})
    prompt_len = prompt_len or len(prompt)
    return Add(
        number, list(prompt), prompt_len, params, list(stop_ids), number, arrival, priority, cache_salt,
        [Fork(fork, fork) for fork in forks], [list(word) for word in bad_words], fork_of=fork_of, deadline=deadline,
        tenant=tenant, alone=alone,
    )  # fmt: skip


def pooled(number: int, prompt: Sequence[int], params: PoolingParams, **fields: Any) -> Add:
    """A request for a vector of a text."""
    return Add(
        number, list(prompt), len(prompt), NO_SAMPLING, [], 0, fields.pop("arrival", 0.0), pooling=params, **fields
    )


def drafts_of(sampling: SamplingParams) -> int:
    """How many draft tokens a request asked for."""
    return int((sampling.extra_args or {}).get("drafts", 0))


class HashMasker:
    """Allows half of the vocabulary; which half depends on every token so far. Who wants it says so."""

    def __init__(self, broken: Sequence[int] = (), vocab_size: int = 512) -> None:
        self._broken = broken
        self._vocab_size = vocab_size
        self.forgotten: list[int] = []
        self.ready = False  # whether masks need not be waited for
        self._asked: list[Masks] = []

    def wants(self, message: Add) -> bool:
        return bool((message.sampling.extra_args or {}).get("masked"))

    def prepare(self, message: Add) -> bool:
        return True

    def prepared(self) -> list[tuple[int, QuireError | None]]:
        return []

    def close(self) -> None:
        pass

    def ask(self, requests: Sequence[Request], drafts: Mapping[int, Sequence[int]]) -> bool:
        assert not self._asked, "asked twice"
        self._asked = [self._masks_of(request, drafts.get(request.id, ())) for request in requests]
        return self.ready

    def bits(self) -> list[Masks]:
        asked, self._asked = self._asked, []
        return asked

    def _masks_of(self, request: Request, drafts: Sequence[int]) -> Masks:
        bits = self.bits_of(request)
        if not isinstance(bits, bytes):
            return bits
        behind = (
            self.mask([*request.tokens, *drafts[:number]], self._vocab_size) for number in range(1, len(drafts) + 1)
        )
        return [bits, *behind]

    def bits_of(self, request: Request) -> bytes | GenerationError:
        if request.id in self._broken:
            return GenerationError("broken")
        return self.mask(request.tokens, self._vocab_size)

    def forget(self, request_id: int) -> None:
        self.forgotten.append(request_id)

    @staticmethod
    def mask(tokens: Sequence[int], vocab_size: int = 512) -> bytes:
        return hashlib.shake_128(array("q", tokens).tobytes()).digest(vocab_size // 8)


def alone(
    prompt: Sequence[int],
    max_tokens: int,
    stop_ids: Sequence[int] = (),
    vocab_size: int = 512,
    sample: Callable[[Sequence[int], int, int], int] = hash_token,
    masked: bool = False,
) -> list[int]:
    """The fake model's output for a prompt, without an engine."""
    history = list(prompt)
    for num_sampled in range(max_tokens):
        token = sample(history, num_sampled, vocab_size)
        history.append(allowed(token, HashMasker.mask(history), vocab_size) if masked else token)
        if history[-1] in stop_ids:
            break
    return history[len(prompt) :]


@dataclass
class Outcome:
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)
    messages: int = 0


class Engine:
    """A client that gathers what comes back, and insists on exactly one end for each sequence. `wait`: seconds of each
    step at most, for an executor that takes time."""

    def __init__(
        self,
        executor: Executor | None = None,
        groups: Sequence[CacheGroup] = FULL_ATTENTION,
        masker: HashMasker | None = None,
        drafts: Callable[[SamplingParams], int] | None = drafts_of,
        wait: float = 0.0,
        pooling: PoolingInfo = NO_POOLING,
        pools_from_cache: Callable[[PoolingParams], bool] | None = None,
        whole_texts: bool = False,
        **settings: object,
    ) -> None:
        self._wait = wait
        info = ModelRuntimeInfo(
            groups, drafts=drafts, shares_blocks=not whole_texts, pooling=pooling, pools_from_cache=pools_from_cache,
            whole_texts=whole_texts,
        )  # fmt: skip
        self.client = InProcessClient(config(**settings), executor or FakeExecutor(), runtime_info=info, masker=masker)
        self.outcome = Outcome()
        assert isinstance(self.client.receive(0), Ready)

    def step(self) -> None:
        message = self.client.receive(self._wait)
        self.outcome.messages += message is not None
        if isinstance(message, Deltas):
            position = 0
            for i, count in zip(message.ids, message.counts, strict=True):
                assert i not in self.outcome.ends, "tokens after the end"
                self.outcome.tokens.setdefault(i, []).extend(message.tokens[position : position + count])
                self.outcome.logprobs.setdefault(i, []).extend(message.logprobs[position : position + count])
                position += count
            for end in message.ends:
                assert end.id not in self.outcome.ends, "two ends"
                self.outcome.ends[end.id] = end

    def run(self, adds: Sequence[Add], steps: int = 5_000) -> Outcome:
        sequences = {sequence.id for message in adds for sequence in message.sequences()}
        for message in adds:
            self.client.send(message)
        for _ in range(steps):
            if sequences <= set(self.outcome.ends):
                break
            self.step()
        assert sequences <= set(self.outcome.ends), "not every request ended"
        self.finish_steps()
        return self.outcome

    def finish_steps(self) -> None:
        """Process the results of all plans in flight."""
        for _ in range(4):
            self.step()

    def assert_all_free(self) -> None:
        counts = self.client.counts()
        assert counts["requests"] == counts["running"] == counts["waiting"] == counts["in_flight"] == 0, counts
        assert counts["free_blocks"] == counts["blocks"], counts
        assert counts["free_slots"] == counts["slots"], counts
        assert counts["free_host_blocks"] == counts["host_blocks"], counts
        assert counts.get("free_states") == counts.get("states"), counts
