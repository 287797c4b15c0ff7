"""`quire bench agent`: sessions of coding agents on a running server, and what of their prompts it computes again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, ClassVar, Literal

import uvloop

from quire.errors import ConfigError
from quire.foundation.config.values import check_positive
from quire.tools.bench.agent_sessions import Session, SessionOptions, make_sessions
from quire.tools.bench.client import ENDPOINTS, Connections, Outcome, StreamingClient
from quire.tools.bench.datasets import Sample
from quire.tools.bench.report import Row, measured_with, progress, summarize, table, write_json
from quire.tools.bench.server import CONNECT_S, ServedModel, ServerOptions, prompt_tokens, served_model
from quire.tools.bench.serving_figures import read_counters

_PERCENTILES = (90, 99)
_MAX_ERRORS_SHOWN = 5


@dataclass(frozen=True)
class AgentOptions(ServerOptions):
    """Which server, and how it is asked."""

    DESCRIPTION: ClassVar[str] = (
        "Replay sessions of coding agents on a running server: prefix cache hits against the ideal, prompt tokens that "
        "are computed again, and the times of turns."
    )

    backend: Literal["openai", "openai-chat"] = "openai"
    """API: openai is text completions of token ids, openai-chat is chat."""
    max_concurrency: int | None = None
    """Most sessions at a time. Default: all."""
    ignore_eos: bool = False
    """Let every output reach its length."""
    output_json: str | None = None
    """Write the result to this file."""
    sessions: SessionOptions = field(default_factory=SessionOptions)

    def __post_init__(self) -> None:
        check_positive(self, "max_concurrency")


@dataclass(frozen=True)
class SessionRun:
    """What came of a session: an outcome for each turn up to the first that failed."""

    session: Session
    outcomes: list[Outcome]

    @property
    def failed(self) -> bool:
        return any(outcome.error for outcome in self.outcomes)


def run(options: AgentOptions) -> int:
    """Measure and report; returns the exit code: 1 if requests failed. Raises QuireError if nothing can be measured."""
    seed = options.drawn_seed
    with options.connect() as http:
        model = served_model(http, options)
        _check_room(options.sessions, model)
        tokens = prompt_tokens(options, http, model)
        sessions = make_sessions(options.sessions, tokens, random.Random(seed))
        is_chat = options.backend == "openai-chat"
        samples = [list(each.conversations(tokens) if is_chat else each.prompts()) for each in sessions]
        before = read_counters(http)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runs = runner.run(_measure(options, model, sessions, samples))
        counted = {name: value - before.get(name, 0.0) for name, value in read_counters(http).items()}
    result = {
        **measured_with(options, options.sessions),
        "seed": seed,
        "model_id": model.name,
        **figures(runs, counted),
    }
    print(_table(result))
    failed = [outcome.error for each in runs for outcome in each.outcomes if outcome.error]
    for error in list(dict.fromkeys(failed))[:_MAX_ERRORS_SHOWN]:
        print(f"quire: warning: a session ended early: {error}", file=sys.stderr)
    if options.output_json is not None:
        write_json(options.output_json, result)
    return 1 if failed else 0


def _check_room(sessions: SessionOptions, model: ServedModel) -> None:
    """Raise ConfigError if the longest turn does not fit into the model's context."""
    longest = sessions.context_len + sessions.turn_len
    if model.max_model_len is not None and longest > model.max_model_len:
        raise ConfigError(
            f"Sessions grow to {longest} tokens (--context-len and --turn-len), and a sequence here holds "
            f"{model.max_model_len}: give smaller lengths.",
            param="context_len",
        )


async def _measure(
    options: AgentOptions, model: ServedModel, sessions: Sequence[Session], samples: Sequence[Sequence[Sample]]
) -> list[SessionRun]:
    body: dict[str, Any] = {"model": model.name, "temperature": 0.0}
    if not model.has_tokenizer:  # a stream without text has chunks only if they carry token ids
        body["return_token_ids"] = True
    if options.ignore_eos:
        body["ignore_eos"] = True
    body |= options.extra_body
    gate: contextlib.AbstractAsyncContextManager[object] = (
        contextlib.nullcontext() if options.max_concurrency is None else asyncio.Semaphore(options.max_concurrency)
    )
    async with Connections(options.root, CONNECT_S, options.headers(), insecure=options.insecure) as connections:
        client = StreamingClient(connections, ENDPOINTS[options.backend], options.backend, body)
        with progress("Turns", sum(map(len, samples))) as advance:
            return await asyncio.gather(
                *(_replay(client, *pair, gate, advance) for pair in zip(sessions, samples, strict=True))
            )


async def _replay(
    client: StreamingClient,
    session: Session,
    samples: Sequence[Sample],
    gate: contextlib.AbstractAsyncContextManager[object],
    advance: Callable[[], None],
) -> SessionRun:
    done = SessionRun(session, [])
    async with gate:
        for turn, sample in zip(session.turns, samples, strict=True):
            await asyncio.sleep(turn.pause)
            done.outcomes.append(await client.ask(sample))
            advance()
            if done.failed:
                break
    return done


def figures(runs: Sequence[SessionRun], counted: dict[str, float]) -> dict[str, Any]:
    """All figures, as plain data for JSON; shares of the cache are None where the server does not tell.

    The ideal is that of a turn's prompt all but what is new is found in the cache: the prompt of the turn before.
    """
    outcomes = [[outcome for outcome in each.outcomes if not outcome.error] for each in runs]
    every = list(chain(*outcomes))
    prompts = sum(outcome.prompt_tokens for outcome in every)
    repeated = sum(before.prompt_tokens for turns in outcomes for before, _ in pairwise(turns))
    cached = _cached(every, counted)
    computed = None if cached is None else prompts - cached
    outputs = sum(outcome.output_tokens for outcome in every)
    return {
        "sessions": len(runs),
        "failed_sessions": sum(each.failed for each in runs),
        "turns": len(every),
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "prompt_to_output": prompts / outputs if outputs else None,
        "new_prompt_tokens": prompts - repeated,
        "computed_prompt_tokens": computed,
        "recomputed_prompt_tokens": None if computed is None else computed - (prompts - repeated),
        "hit_rate": None if cached is None or not prompts else cached / prompts,
        "ideal_hit_rate": repeated / prompts if prompts else None,
        "share_of_ideal": None if cached is None or not repeated else cached / repeated,
        "duration": max((outcome.end for outcome in every), default=0.0)
        - min((outcome.start for outcome in every), default=0.0),
        **_times("first_turn_ttft", [turns[0].ttft for turns in outcomes if turns]),
        **_times("ttft", [outcome.ttft for turns in outcomes for outcome in turns[1:]]),
        **_times("turn", [outcome.e2e_latency for turns in outcomes for outcome in turns[1:]]),
    }


def _cached(outcomes: Sequence[Outcome], counted: dict[str, float]) -> int | None:
    """Prompt tokens that were found in the cache, as answers say, or else the server's counters."""
    told = [outcome.cached_tokens for outcome in outcomes]
    if told and None not in told:
        return sum(filter(None, told))
    return round(counted["prefix_hits"]) if "prefix_hits" in counted else None


def _times(name: str, seconds: Sequence[float | None]) -> dict[str, float]:
    known = summarize([1e3 * each for each in seconds if each is not None], _PERCENTILES)
    percentiles = {f"p{wanted}_{name}_ms": value for wanted, value in known.percentiles.items()}
    return {f"mean_{name}_ms": known.mean, f"median_{name}_ms": known.median, **percentiles}


def _table(result: dict[str, Any]) -> str:
    rows: list[Row] = [
        ("Sessions", f"{result['sessions']}"),
        ("Sessions that failed", f"{result['failed_sessions']}"),
        ("Turns", f"{result['turns']}"),
        ("Duration (s)", f"{result['duration']:.2f}"),
        ("Prompt tokens", f"{result['prompt_tokens']}"),
        ("Output tokens", f"{result['output_tokens']}"),
        ("Prompt to output", _shown(result["prompt_to_output"], ".0f", ":1")),
        ("Seed", f"{result['seed']}"),
    ]
    cache: list[Row] = [
        ("Hit rate", _shown(result["hit_rate"], ".4f")),
        ("Ideal hit rate", _shown(result["ideal_hit_rate"], ".4f")),
        ("Share of the ideal", _shown(result["share_of_ideal"], ".4f")),
        ("New prompt tokens", f"{result['new_prompt_tokens']}"),
        ("Computed prompt tokens", _shown(result["computed_prompt_tokens"], "d")),
        ("Computed again", _shown(result["recomputed_prompt_tokens"], "d")),
    ]
    sections = [("", rows), ("Prefix cache", cache)]
    names = {
        "first_turn_ttft": "Time to first token of first turns, ms",
        "ttft": "Time to first token of later turns, ms",
        "turn": "Later turns, ms",
    }
    for name, title in names.items():
        kinds = ("mean", "median", *(f"p{wanted}" for wanted in _PERCENTILES))
        sections.append((title, [(kind.capitalize(), f"{result[f'{kind}_{name}_ms']:.2f}") for kind in kinds]))
    return table("Agent benchmark result", sections)


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "not reported" if value is None else f"{value:{form}}{unit}"
