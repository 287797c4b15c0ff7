"""How many states there are: of the sequences that run, and of checkpoints, in models whose layers keep states.

Sequences come first. What is left of the memory is divided between KV blocks and checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.errors import ConfigError, MemoryBudgetError
from quire.foundation.config import Config
from quire.models.spec import ModelSpec
from quire.planning.footprint import format_bytes
from quire.planning.step_limits import StepLimits

_AT_ENDS = 3
"""Checkpoints of a sequence beside those at regular distances: at the ends of its prompt and its output, and one that
forks begin with."""
_WITH_DRAFTS = 2
"""Further checkpoints of a sequence with drafts: behind blocks that it may reach in the steps in flight."""
_SEQUENCES_SHARE = 0.2
"""The share of the memory that states of sequences may take if --max-num-seqs is not given."""


def check_states(config: Config, spec: ModelSpec, device: str) -> None:
    """Refuse settings that a model with states cannot be served with.

    Raises:
        ConfigError: The message names the setting and what to do.
    """
    if not spec.state_layers:
        return
    cache, name = config.cache, spec.architecture
    if device != "cpu" and spec.on_cpus_alone:
        raise ConfigError(
            f"{name} has recurrent layers that run on a CPU alone so far: give --model-impl transformers or "
            "--device cpu.",
            param="model_impl",
        )
    speculation = config.speculation.speculation
    if speculation is not None and speculation.method not in ("ngram", "suffix") and not spec.kv_groups():
        raise ConfigError(
            f"--speculative-config: no layer of {name} caches tokens, and a draft model would in the same blocks: use "
            '"method": "ngram" or "suffix".',
            param="speculative_config",
        )
    if cache.state_spacing < 1 or cache.state_spacing % cache.block_size:
        raise ConfigError(
            f"--mamba-block-size {cache.state_spacing}: checkpoints lie at the ends of blocks, so give a multiple of "
            f"--block-size {cache.block_size}.",
            param="mamba_block_size",
        )
    if not 0 <= cache.mamba_cache_share < 1:
        raise ConfigError(
            f"--mamba-cache-share {cache.mamba_cache_share:g} is no share of memory: give at least 0, less than 1.",
            param="mamba_cache_share",
        )


def scratch_states(limits: StepLimits) -> int:
    """Return on how many states rows with drafts run: one a sequence, 0 without drafts."""
    return limits.rows if limits.drafts else 0


def most_sequences(spec: ModelSpec, dtype: str, memory: int, *, drafts: bool = False) -> int | None:
    """Return how many sequences run at a time at most unless the settings say it: their states, or an encoder's, take
    some of a rank's memory, twice as much with drafts. None in models without states and encoders.
    """
    size = spec.state_bytes(dtype) * (1 + drafts) + spec.source_bytes(dtype)
    return max(1, int(_SEQUENCES_SHARE * memory) // size) if size else None


def num_states(config: Config, spec: ModelSpec, limits: StepLimits, left: int | None) -> int:
    """Return the number of states without the dummy; 0 in models without states.

    Args:
        spec: A rank's share of the model.
        left: Bytes for states and KV blocks; None: the settings say how many states there are, or else there are two
            for each sequence.

    Raises:
        ConfigError: A setting asks for less than one state for each sequence.
        MemoryBudgetError: There is no room for one state for each sequence.
    """
    size, rows, cache = spec.state_bytes(config.model.dtype), limits.rows, config.cache
    if not size:
        return 0
    if (asked := cache.num_states_override) is not None:
        if asked < rows:
            raise ConfigError(
                f"--num-states-override {asked}: give at least --max-num-seqs ({rows}), a state for each sequence.",
                param="num_states_override",
            )
        return asked
    if left is None:
        return 2 * rows
    least = rows + 1 + scratch_states(limits)
    if (spare := left - least * size) < 0:
        fewer = max(1, left // (2 * size) // (2 if limits.drafts else 1))
        raise MemoryBudgetError(
            f"The states of {rows} sequences take {format_bytes(least * size)}, and {format_bytes(max(0, left))} "
            f"are left: give --max-num-seqs {fewer}, or raise --gpu-memory-utilization."
        )
    of_each = _AT_ENDS + (_WITH_DRAFTS if limits.drafts else 0)
    if cache.enable_prefix_caching and cache.mamba_cache_mode != "none":
        of_each += limits.length // cache.state_spacing
    return rows + min(rows * of_each, int(cache.mamba_cache_share * spare) // size)


def smallest_number_of_states(offers: Iterable[int]) -> int:
    """Return the number of states that all ranks have room for; a rank whose layers have none offers 0."""
    return min((offer for offer in offers if offer), default=0)


def states_bytes(config: Config, spec: ModelSpec, limits: StepLimits, number: int) -> int:
    """Return the bytes of so many states, the dummy and scratch states; 0 in models without states."""
    return (number + 1 + scratch_states(limits)) * spec.state_bytes(config.model.dtype) if number else 0
