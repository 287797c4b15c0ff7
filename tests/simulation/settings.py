"""What a seed stands for: the server's settings, the load and the faults of one run.

Each run has some of the features and some of the faults, so that no combination is always masked by another one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.foundation.config import Config
from quire.foundation.config.scheduler import Policy, PreemptionMode
from quire.scheduling.kvcache.cache_groups import FULL, CacheGroup, Chunk, Reach, Window

MAX_MODEL_LEN = 96
MAX_PROMPTS, MAX_CHOICES = 2, 4
MAX_SEQUENCES = MAX_PROMPTS * MAX_CHOICES
"""Of one request."""
SHUTDOWN_S = 900.0
"""What open requests get at the end: enough for all of them, whatever happens."""

FAULTS = (
    "engine killed", "engine killed in a turn", "engine raises", "engine stopped", "engine stopped for long",
    "engine hangs", "step hangs", "slow step", "row breaks", "engine start fails", "api killed", "api stopped",
    "api stopped for long", "api hangs", "api hangs for long", "message corrupted", "network slow", "clock jumps",
    "two deaths",
)  # fmt: skip
"""Kinds of faults; see `faults.py`."""

FEATURES = (
    "choices", "stop tokens", "log probabilities", "priorities", "salts", "tenants", "timeouts", "grammars",
    "disconnects", "slow readers", "several prompts", "poison", "pauses", "penalties", "drafts", "bursts",
    "pooled texts",
)  # fmt: skip
"""What requests and operators do; see `traffic.py`."""


REACHES: tuple[tuple[Reach, ...], ...] = (
    (FULL,), (FULL,), (FULL, Window(11)), (Window(9),), (FULL, Chunk(12)),
)  # fmt: skip
"""How far back the KV groups of a run look."""


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        config: Of the server.
        num_blocks, num_host_blocks: Of the KV cache.
        groups: The KV groups.
        num_states: States of sequences and checkpoints; 0: the model has none.
        num_disk_blocks: Of the host tier's disk; 0: there is none.
        max_in_flight: Plans in flight.
        token_s: What a token of a step takes.
        arrival_s: Mean time between two requests.
        max_open: No request arrives while so many are open.
        features, faults: Those of this run.
        fault_s: Mean time between two faults; infinite for none.
        drains_early: Whether the server is told to end while requests still arrive.
    """

    config: Config
    num_blocks: int
    num_host_blocks: int
    groups: Sequence[CacheGroup]
    max_in_flight: int
    token_s: float
    arrival_s: float
    max_open: int
    features: frozenset[str]
    faults: Sequence[str]
    fault_s: float
    drains_early: bool
    num_states: int = 0
    num_disk_blocks: int = 0

    def first_visible(self, position: int) -> int:
        """The first position that the model sees from `position`."""
        return min(group.reach.first_visible(position) for group in self.groups)


def settings_of(rng: random.Random) -> Settings:
    """The run that these random numbers stand for."""
    num_blocks, block_size = rng.choice(((14, 8), (24, 8), (60, 4), (100, 2), (40, 4), (30, 16), (120, 8)))
    policy: Policy = rng.choice(("fcfs", "priority"))
    mode: PreemptionMode | None = rng.choice(("swap", "recompute", None))
    config = Config().with_values(
        max_num_seqs=rng.choice((1, 2, 4, 8)),
        max_num_batched_tokens=rng.choice((8, 16, 32, 64)),
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=rng.random() < 0.8,
        scheduling_policy=policy,
        preemption_mode=mode,
        max_queued_requests=rng.choice((None, None, 3, 10)),
        cache_isolation=rng.random() < 0.2,
        max_restarts=rng.choice((*([1_000] * 28), 2, 0)),
        shutdown_timeout=SHUTDOWN_S,
    )
    config = replace(config, cache=replace(config.cache, block_size=block_size))  # any: there are no kernels
    features = frozenset(name for name in FEATURES if rng.random() < 0.5)
    num_states = 0
    if rng.random() < 0.35:
        num_states = (config.scheduler.max_num_seqs or 0) + rng.choice((0, 2, 8, 40))
        spacing = block_size * rng.choice((1, 2, 100))
        config = replace(config, cache=replace(config.cache, mamba_block_size=spacing))
    faults = [name for name in FAULTS if rng.random() < 0.4]
    if not config.server.max_restarts:
        faults = [name for name in faults if name != "step hangs"]  # nobody would replace the engine
    settings = Settings(
        config=config,
        num_blocks=num_blocks,
        num_host_blocks=rng.choice((0, 10, 200)),
        groups=[CacheGroup(reach=reach) for reach in rng.choice(REACHES)],
        max_in_flight=rng.choice((1, 2, 2, 3)),
        token_s=rng.choice((1e-4, 5e-4, 1e-3)),
        arrival_s=rng.choice((0.003, 0.02, 0.1)),
        max_open=rng.choice((4, 12, 30)),
        features=features,
        faults=faults,
        fault_s=rng.choice((0.3, 1.0, 3.0, 10.0)) if faults else float("inf"),
        drains_early=rng.random() < 0.1,
        num_states=num_states,
    )
    if rng.random() < 0.5:
        cache = replace(config.cache, kv_offloading_size=1.0)
        return replace(settings, config=replace(config, cache=cache), num_disk_blocks=rng.choice((0, 12, 300)))
    return settings
