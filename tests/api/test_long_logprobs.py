"""Long lists of log probabilities are written a slice at a time: meanwhile the event loop serves others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from quire.foundation.messages.from_engine import Deltas, End
from quire.foundation.messages.workers import TokenLogprobs
from quire.text.sequence_accumulator import SequenceAccumulator
from tests.api.scripted import READY, ScriptedClient
from tests.api.server import Server, running
from tests.api.test_lifetimes import in_background

PROMPT_LEN, TOP = 500, 20
MAX_IN_A_TURN = 1_100
"""Look-ups of a token, of the 10,000 to 20,000 that a response needs."""
ENTRIES = [
    TokenLogprobs(-1.0, 1, list(range(i % 60, i % 60 + TOP)), [-0.5 * k for k in range(TOP)]) for i in range(499)
]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, ScriptedClient]]:
    client = ScriptedClient()
    client.say(READY)
    with running(tmp_path_factory.mktemp("model"), client=lambda: client) as server:
        yield server, client


async def count_turns(turns: list[int]) -> None:
    while True:
        turns[0] += 1
        await asyncio.sleep(0)


def busiest_turn(server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Tokens whose text was looked up, by turn of the event loop; filled while requests are served."""
    turns, lookups = [0], dict[int, int]()
    tokenizer: Any = server.text.tokenizer

    def counted(method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            lookups[turns[0]] = lookups.get(turns[0], 0) + 1
            return method(*args, **options)

        return call

    for name in ("decode", "token_bytes"):
        monkeypatch.setattr(tokenizer, name, counted(getattr(tokenizer, name)))
    server.in_loop(_start(count_turns(turns)))
    return lookups


async def _start(work: Any) -> None:
    asyncio.get_running_loop().ticker = asyncio.ensure_future(work)  # type: ignore[attr-defined]


async def _stop() -> None:
    asyncio.get_running_loop().ticker.cancel()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [[7] * PROMPT_LEN] * 2, "prompt_logprobs": TOP, "n": 2}),
        ("/v1/completions", {"prompt": [7] * PROMPT_LEN, "logprobs": TOP, "echo": True}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": TOP},
        ),
    ],
    ids=["prompt_logprobs", "echo", "chat"],
)
def test_no_turn_of_the_event_loop_writes_more_than_a_slice(
    scripted: tuple[Server, ScriptedClient], monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    server, client = scripted
    client.adds.clear()
    body = fields | {"max_tokens": 1 if "prompt" in fields else 490}
    thread, result = in_background(lambda: server.post(path, body))
    adds = client.wait_for_adds(len(fields.get("prompt", [1])) * fields.get("n", 1) if "n" in fields else 1)
    lookups = busiest_turn(server, monkeypatch)
    for add in adds:
        count = 1 if "prompt" in fields else 490
        own = ENTRIES if add.fork_of is None and "prompt" in fields else []
        client.say(
            Deltas([add.id], [count], [70] * count, ENTRIES[:count] if "logprobs" in fields else [],  # type: ignore[arg-type]
                   [End(add.id, "length")], prompt_logprobs=[(add.id, own)])
        )  # fmt: skip
    thread.join()
    server.in_loop(_stop())
    assert result[0].status_code == 200, result[0].text
    assert sum(lookups.values()) > 10_000
    assert max(lookups.values()) <= MAX_IN_A_TURN


def test_prompt_logprobs_are_those_of_offline_use(scripted: tuple[Server, ScriptedClient]) -> None:
    server, client = scripted
    client.adds.clear()
    prompt = [3 + i % 90 for i in range(PROMPT_LEN)]
    fields = {"prompt": prompt, "prompt_logprobs": TOP, "max_tokens": 1}
    thread, result = in_background(lambda: server.post("/v1/completions", fields))
    (add,) = client.wait_for_adds(1)
    client.say(Deltas([add.id], [1], [70], [], [End(add.id, "length")], prompt_logprobs=[(add.id, ENTRIES)]))
    thread.join()
    offline = SequenceAccumulator(add, 0, None)  # type: ignore[arg-type]
    offline.whole.prompt_logprobs += ENTRIES
    expected = msgspec.to_builtins(offline.prompt_logprobs(server.text.tokenizer), str_keys=True)
    assert result[0].json()["choices"][0]["prompt_logprobs"] == expected
    assert len(expected) == PROMPT_LEN


@pytest.mark.parametrize("fields", [{"prompt_logprobs": TOP}, {"logprobs": TOP, "echo": True}])
def test_an_answer_that_the_engine_broke_off_has_what_was_computed(
    scripted: tuple[Server, ScriptedClient], fields: dict[str, Any]
) -> None:
    server, client = scripted
    client.adds.clear()
    thread, result = in_background(
        lambda: server.post("/v1/completions", {"prompt": [7] * PROMPT_LEN, "max_tokens": 1, **fields})
    )
    (add,) = client.wait_for_adds(1)
    client.say(Deltas([], [], [], [], [End(add.id, "abort")], prompt_logprobs=[(add.id, ENTRIES[:100])]))
    thread.join()
    assert result[0].status_code == 200, result[0].text
    (choice,) = result[0].json()["choices"]
    assert choice["finish_reason"] == "abort"
    rows = choice["logprobs"]["top_logprobs"] if "echo" in fields else choice["prompt_logprobs"]
    assert [row is None for row in rows] == [True, *[False] * 100, *[True] * (PROMPT_LEN - 101)]
