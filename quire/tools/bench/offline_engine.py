"""An engine in this process for a benchmark, and the tokens of its model.

Loads torch: imported by the benchmarks that compute, never by the server's side.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Any

from quire.foundation.config import Config
from quire.offline.llm import LLM
from quire.planning.auto_config import resolve
from quire.tools.bench.tokens import LocalTokens


@dataclass(frozen=True)
class OfflineEngine:
    """A started engine.

    Attributes:
        config: With every choice made.
        tokens: Random ids of the whole vocabulary; texts unless the tokenizer was left out.
    """

    llm: LLM
    config: Config
    tokens: LocalTokens


def start_engine(config: Config) -> OfflineEngine:
    """Start the engine and say what was chosen.

    Raises:
        SetupError: The model cannot be served.
    """
    resolved = resolve(config)
    for reason in resolved.reasons:
        print(f"  {reason}", file=sys.stderr)
    llm = LLM(**_changed(config))
    tokenizer = None if config.model.skip_tokenizer_init else llm.get_tokenizer()
    return OfflineEngine(llm, resolved.config, LocalTokens(resolved.spec.vocab_size, tokenizer))


def _changed(config: Config) -> dict[str, Any]:
    """Settings that are not the defaults, by their flat names."""
    default = Config()
    return {
        f.name: value
        for part in fields(config)
        for f in fields(getattr(config, part.name))
        if (value := getattr(getattr(config, part.name), f.name)) != getattr(getattr(default, part.name), f.name)
    }
