"""One streamed request: what counts as a token, what as an error, and what the client itself costs."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from quire.tools.bench.client import ENDPOINTS, Backend, Connections, Outcome, StreamingClient
from quire.tools.bench.datasets import Sample
from quire.tools.bench.load import Load, run_load
from tests.bench.scripted_server import HEAD, Body, ScriptedServer, event, text_event, tokens
from tests.engine.test_client_liveness import ManualClock


def load(
    server: ScriptedServer, samples: list[Sample], concurrency: int | None = None, backend: Backend = "openai"
) -> Load:
    async def run() -> Load:
        async with Connections(f"http://127.0.0.1:{server.port}", connect_s=5.0) as connections:
            client = StreamingClient(connections, ENDPOINTS[backend], backend, {"model": "tiny"})
            return await run_load(client, samples, [0.0] * len(samples), concurrency, lambda: None)

    return asyncio.run(run())


def ask(
    server: ScriptedServer, backend: Backend = "openai", output_len: int = 5, images: tuple[str, ...] = ()
) -> Outcome:
    return load(server, [Sample("hello", output_len, images=images)], backend=backend).outcomes[0]


class SeenClock(ManualClock):
    """The client's clock, on which time passes from one token to the next and at no other time.

    Attributes:
        looks: How often the client has looked at it.
    """

    looks = 0

    def now(self) -> float:
        self.looks += 1
        return super().now()

    async def token_comes(self) -> None:
        """The one before has been read; the next one comes 20 ms later."""
        while self.looks == self._looks:
            await asyncio.sleep(0.001)
        self._looks = self.looks
        self.time += 0.02

    _looks = 0


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_times_and_counts_are_those_of_the_tokens(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SeenClock()
    monkeypatch.setattr("quire.tools.bench.client.time", SimpleNamespace(perf_counter=clock.now))
    with ScriptedServer(lambda body, writer: tokens(body, writer, before_each=clock.token_comes, cached=2)) as server:
        outcome = ask(server, backend)
    assert outcome.error == ""
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (5, 5, 2)
    assert outcome.text == "xxxxx"
    assert outcome.ttft == pytest.approx(0.02)
    assert outcome.itls == pytest.approx([0.02] * 4)
    assert outcome.e2e_latency == pytest.approx(outcome.ttft + sum(outcome.itls))
    assert outcome.tpot == pytest.approx(sum(outcome.itls) / 4)


def test_what_is_sent() -> None:
    with ScriptedServer() as server:
        ask(server)
        ask(server, "openai-chat")
        ask(server, "openai-chat", images=("data:image/png;base64,AAAA",))
    plain, chat, shown = server.bodies
    assert shown["messages"][0]["content"] == [
        {"type": "text", "text": "hello"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    common = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}}
    assert plain == {"prompt": "hello", "max_tokens": 5, **common}
    assert chat == {"messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 5, **common}


async def held_back(body: Body, writer: asyncio.StreamWriter) -> None:
    """Tokens without text count; an opening does not."""
    writer.write(HEAD.format(status=200, kind="text/event-stream").encode())
    writer.write(event(choices=[{"delta": {"role": "assistant", "content": ""}}]))
    writer.write(event(choices=[{"delta": {"content": ""}}]))
    writer.write(event(choices=[{"delta": {"content": "é"}}]))
    writer.write(event(choices=[{"delta": {}, "finish_reason": "stop"}]) + b"data: [DONE]\n\n")


def test_tokens_without_usage_are_counted_from_events() -> None:
    with ScriptedServer(held_back) as server:
        assert ask(server, "openai-chat").output_tokens == 2


async def cut_in_pieces(body: Body, writer: asyncio.StreamWriter) -> None:
    """Events do not end where packets do."""
    writer.write(HEAD.format(status=200, kind="text/event-stream").encode())
    whole = text_event("é") * 3 + b"data: [DONE]\n\n"
    for number in range(0, len(whole), 7):
        writer.write(whole[number : number + 7])
        await writer.drain()
        await asyncio.sleep(0.001)


def test_events_in_pieces_are_put_together() -> None:
    with ScriptedServer(cut_in_pieces) as server:
        outcome = ask(server)
    assert (outcome.text, outcome.error, outcome.output_tokens) == ("ééé", "", 3)


def failing(status: int, *chunks: bytes) -> Any:
    async def answer(body: Body, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD.format(status=status, kind="text/event-stream").encode() + b"".join(chunks))

    return answer


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (failing(400, b'{"error": {"message": "too long"}}'), "HTTP 400: too long"),
        (failing(500, b"oops"), "HTTP 500: oops"),
        (failing(200, text_event("x")), "The stream ended early."),
        (failing(200), "The stream ended early."),
        (failing(200, text_event("x"), event(error={"message": "engine died"}), b"data: [DONE]\n\n"), "engine died"),
        (failing(200, b"data: {\n\n"), "DecodeError"),
    ],
)
def test_what_goes_wrong_is_in_the_outcome(answer: Any, said: str) -> None:
    with ScriptedServer(answer) as server:
        outcome = ask(server)
    assert said in outcome.error
    assert outcome.end > outcome.start


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        ([], 0),
        ([event(choices=[{"text": "", "finish_reason": "stop"}], usage={"completion_tokens": 1})], 1),
        ([event(choices=[{"text": "", "finish_reason": "length"}], usage={"completion_tokens": 300})], 300),
    ],
)
def test_an_answer_without_text_is_a_success(events: list[bytes], tokens: int) -> None:
    with ScriptedServer(failing(200, *events, b"data: [DONE]\n\n")) as server:
        done = load(server, [Sample("hello", 300)])
    (outcome,) = done.completed
    assert (outcome.text, outcome.output_tokens) == ("", tokens)
    assert (outcome.ttft, outcome.tpot) == (None, None)  # nothing tells when a token came
    assert outcome.e2e_latency == outcome.end - outcome.start > 0
    assert done.peak_token_rate() == pytest.approx(tokens / min(1.0, done.duration))


def test_a_server_that_is_not_there() -> None:
    with ScriptedServer() as server:
        pass
    assert "ConnectionRefusedError" in ask(server).error


def test_concurrency_is_limited_and_seen() -> None:
    samples = [Sample("hello", 3)] * 12
    with ScriptedServer(lambda body, writer: tokens(body, writer, gap=0.01)) as server:
        measured = load(server, samples, concurrency=3)
    assert server.max_open == 3
    assert len(measured.completed) == 12
    assert max(count for _, count in measured.in_flight()) == 3
    assert measured.in_flight()[-1][1] == 0


def test_the_client_costs_little() -> None:
    """A token of a busy stream costs the client little of its core, the server's share of this process left out."""
    samples = [Sample("hello", 200)] * 20
    with ScriptedServer() as server:
        began, cpu = time.perf_counter(), time.thread_time()
        measured = load(server, samples)
        cost, whole = time.thread_time() - cpu, time.perf_counter() - began
    assert len(measured.completed) == 20
    assert sum(outcome.output_tokens for outcome in measured.outcomes) == 4000
    assert cost / 4000 < 0.1e-3, f"{cost / 4000 * 1e6:.0f} µs of client CPU a token ({whole:.2f} s)"
