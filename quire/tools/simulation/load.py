"""What a simulation or a plan is asked to serve: the model, which is never downloaded, and the load, which comes from a
file or is made as `quire bench serve` makes it with the same seed.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from quire.errors import ModelNotFoundError
from quire.foundation.config import BUILTIN_MODEL
from quire.models.spec import ModelSpec
from quire.models.weights import hub
from quire.text.tokenizer import load_tokenizer
from quire.tools.bench.datasets import LocalTokens, Tokens, make_samples
from quire.tools.bench.load import arrival_times
from quire.tools.simulation.options import SimulateOptions
from quire.tools.simulation.trace import Trace, from_samples, read_trace


def asked_load(options: SimulateOptions, spec: ModelSpec, directory: Path) -> Trace:
    """The requests, in order. The tokenizer is the model's if none is named. Raises ConfigError if a file cannot be
    read or options contradict each other, and ModelNotFoundError if a dataset of text has no tokenizer."""
    rng = random.Random(options.seed)

    def tokens() -> Tokens:
        name = options.tokenizer or str(directory)
        return LocalTokens(spec.vocab_size, load_tokenizer(hub.resolve(name, weights=False)))

    if options.file.trace is not None:
        return read_trace(options.file, options.arrivals, options.dataset.num_prompts, tokens, rng)
    made_up = options.dataset.name in ("random", "prefix_repetition")
    known: Tokens = LocalTokens(spec.vocab_size) if made_up else tokens()
    samples = make_samples(options.dataset, known, rng)
    times = arrival_times(options.arrivals, len(samples), rng)
    return from_samples(samples, known, times, options.arrivals.max_concurrency)


def timed_load(options: SimulateOptions, spec: ModelSpec, directory: Path) -> Trace:
    """The requests of `asked_load`; if they would all come at once, they come at one request a second instead."""
    load = asked_load(options, spec, directory)
    if load.seconds:
        return load
    return asked_load(replace(options, arrivals=replace(options.arrivals, request_rate=1.0)), spec, directory)


def find_model(name: str) -> Path:
    """The directory with the model's config.json. Raises ModelNotFoundError, which says what to do, if the model is not
    on this machine, and CheckpointError if a GGUF file is broken or not served."""
    path = Path(name).expanduser()
    if path.name == "config.json" and path.is_file():
        return path.parent
    if path.exists() or name == BUILTIN_MODEL:
        return hub.resolve(name)
    from huggingface_hub import try_to_load_from_cache  # takes 0.3 s
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        found = None
    if not isinstance(found, str):
        raise ModelNotFoundError(
            f"'{name}' is neither here nor in the hub's local cache. Only its config.json is needed: give its path, "
            f"or fetch it with `hf download {name} config.json`."
        )
    return Path(found).parent
