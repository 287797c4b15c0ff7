"""What clients ask for: requests of many kinds, most of them with a beginning in common."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

from quire.pooling_params import NO_SAMPLING, PoolingParams, PoolingTask
from quire.sampling_params import SamplingParams
from quire.structured_outputs_params import StructuredOutputsParams
from tests.simulation.model import BROKEN_GRAMMAR, GRAMMAR, POISON, VOCAB_SIZE
from tests.simulation.settings import MAX_CHOICES, MAX_MODEL_LEN, MAX_PROMPTS, Settings
from tests.simulation.world import World

STEMS = [[(start + 7 * i) % (VOCAB_SIZE - 1) for i in range(60)] for start in (0, 3)]
"""Most prompts begin alike, so that prefixes are found."""


@dataclass(frozen=True)
class Ask:
    """One HTTP request.

    Attributes:
        number: Counts from 1.
        prompts, params, priority, salt, grammar, timeout, tenant: See EngineSession.add_request.
        pooling: What is to be made of the texts in place of tokens; `params` is NO_SAMPLING then.
        skip: How many of each text's first tokens are not pooled.
        leaves_after: Tokens after which the client disconnects; None: it stays.
        leaves_s: Seconds after which it does.
        pause_s: How long it takes to read what came, each time.
    """

    number: int
    prompts: list[list[int]]
    params: SamplingParams
    priority: int = 0
    salt: str = ""
    grammar: str = ""
    timeout: float | None = None
    tenant: str = ""
    leaves_after: int | None = None
    leaves_s: float | None = None
    pause_s: float = 0.0
    pooling: PoolingParams | None = None
    skip: int = 0

    @property
    def is_poison(self) -> bool:
        """Whether it ends the engine."""
        return any(POISON in prompt for prompt in self.prompts)


class Generator:
    """Makes requests.

    Args:
        world: For the random numbers.
        settings: Of the run.
    """

    def __init__(self, world: World, settings: Settings) -> None:
        self._rng = world.random("traffic")
        self._settings = settings
        self._numbers = itertools.count(1)

    def next(self) -> Ask:
        """Another request."""
        rng, features = self._rng, self._settings.features

        def some(feature: str, chance: float) -> bool:
            return rng.random() < chance and feature in features

        number, capacity = next(self._numbers), self._longest()
        poison = some("poison", 0.01)
        prompts = [self._prompt(rng, capacity) for _ in range(MAX_PROMPTS if some("several prompts", 0.1) else 1)]
        if poison:
            prompts[-1][rng.randrange(len(prompts[-1]))] = POISON
        room = capacity - max(map(len, prompts))
        max_tokens = min(room, rng.choice((1, 2, 5, 10, 25, 40)))
        has_grammar = some("grammars", 0.3)
        params = SamplingParams(
            n=rng.choice((2, 3, MAX_CHOICES)) if some("choices", 0.3) else 1,
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens) if some("stop tokens", 0.3) else 0,
            stop_token_ids=rng.sample(range(VOCAB_SIZE - 1), 6) if some("stop tokens", 0.5) else None,
            ignore_eos=rng.random() < 0.5,
            seed=rng.choice((1, rng.getrandbits(62))),
            logprobs=rng.choice((0, 2)) if some("log probabilities", 0.3) else None,
            prompt_logprobs=rng.choice((0, 1)) if some("log probabilities", 0.2) else None,
            presence_penalty=0.5 if some("penalties", 0.2) else 0.0,
            structured_outputs=StructuredOutputsParams(json_object=True) if has_grammar else None,
        )
        leaves = some("disconnects", 0.2)
        ask = Ask(
            number,
            prompts,
            params,
            priority=rng.randint(-2, 2) if some("priorities", 0.5) and self._by_priority else 0,
            salt=rng.choice(("x", "y")) if some("salts", 0.3) else "",
            grammar="" if not has_grammar else BROKEN_GRAMMAR if rng.random() < 0.05 else GRAMMAR,
            timeout=rng.choice((0.01, 0.5, 5.0, 60.0)) if some("timeouts", 0.3) else None,
            tenant=rng.choice(("a", "b", "c")) if "tenants" in features else "",
            leaves_after=rng.randint(0, max_tokens) if leaves and rng.random() < 0.5 else None,
            leaves_s=rng.choice((0.0, 0.01, 0.1, 2.0)) if leaves else None,
            pause_s=rng.choice((0.001, 0.05, 1.0)) if some("slow readers", 0.3) else 0.0,
        )
        return self._pooled(ask) if some("pooled texts", 0.4) else ask

    def _pooled(self, ask: Ask) -> Ask:
        """A request for vectors of the same texts."""
        sees_all = not self._settings.first_visible(MAX_MODEL_LEN)
        task: PoolingTask = "token_embed" if sees_all and self._rng.random() < 0.3 else "embed"
        skip = self._rng.randrange(min(map(len, ask.prompts))) if self._rng.random() < 0.3 else 0
        return replace(ask, params=NO_SAMPLING, grammar="", pooling=PoolingParams(task=task), skip=skip)

    @property
    def _by_priority(self) -> bool:
        return self._settings.config.scheduler.scheduling_policy == "priority"

    def _longest(self) -> int:
        """Tokens that any request may have: what surely fits."""
        settings = self._settings
        blocks = settings.num_blocks // len(settings.groups)
        return min(MAX_MODEL_LEN, blocks * settings.config.cache.block_size) - 2

    def _prompt(self, rng: random.Random, capacity: int) -> list[int]:
        own = [rng.randrange(VOCAB_SIZE - 1) for _ in range(rng.randint(1, 12))]
        shared = rng.choice((0, 8, 16, rng.randint(0, 60)))
        return [*rng.choice(STEMS)[:shared], *own][: capacity - 1]
