"""Large bodies, texts and conversations: read by other processes, with the answers that small ones get."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ContextLengthError, OverloadedError, QuireError, RequestError, UnsupportedField
from quire.serving.api.large_requests import readers as module
from quire.serving.api.large_requests.readers import CheckBody, Encode, LargeRequestReaders
from quire.serving.api.prompt_renderer import LARGE, Conversation, PromptRenderer
from quire.serving.api.request_body import LARGE_BYTES
from quire.serving.api.schemas.chat import ChatMessage, ChatRequest
from quire.serving.api.schemas.known_fields import NO_FIELDS, OPENAI_FIELDS
from quire.text.model_text import ModelText, load_model_text
from tests.api.server import Server, resolved

LONG = "some words, and more of them. " * (LARGE // 20)
KEPT = 20_000
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if tools %}{{ tools|length }}{% endif %}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def readers(directory: Path) -> Iterator[LargeRequestReaders]:
    readers = LargeRequestReaders(resolved(directory, chat_template=TEMPLATE))
    yield readers
    readers.close()


@pytest.fixture(scope="module")
def text(directory: Path) -> ModelText:
    return load_model_text(resolved(directory, chat_template=TEMPLATE))


@pytest.fixture
def renderer(readers: LargeRequestReaders, text: ModelText) -> Iterator[PromptRenderer]:
    renderer = PromptRenderer(text, readers)
    yield renderer
    renderer.close()


def error_of(work: Callable[[], Any]) -> QuireError:
    with pytest.raises(QuireError) as raised:
        work()
    return raised.value


def test_long_texts_get_the_tokens_that_the_tokenizer_makes_of_them(renderer: PromptRenderer, text: ModelText) -> None:
    assert text.tokenizer is not None
    expected = text.tokenizer.encode(LONG)

    async def work() -> None:
        assert await renderer.encode(LONG, True, 10**9) == expected
        assert await renderer.encode(LONG, True, 10**9, (KEPT, "left")) == expected[-KEPT:]
        assert await renderer.encode(LONG, True, 10**9, (KEPT, "right")) == expected[:KEPT]
        assert await renderer.decode(expected * 2) == text.tokenizer.decode(expected * 2, skip_special_tokens=False)
        with pytest.raises(ContextLengthError):
            await renderer.encode(LONG, True, 5)
        with pytest.raises(RequestError, match="unpaired surrogate"):
            await renderer.encode(LONG + "\ud800", True, 10**9)

    asyncio.run(work())


def test_long_conversations_are_rendered_as_short_ones_are(renderer: PromptRenderer, text: ModelText) -> None:
    assert text.chat_template is not None
    messages = [ChatMessage(role="user", content=LONG), ChatMessage(role="assistant", content="b")]
    many = [ChatMessage(role="user", content="a")] * (LARGE // 40)
    tools = [{"type": "function", "function": {"name": "f", "description": LONG}}]
    for conversation in (
        Conversation(messages),
        Conversation(messages, continue_final_message=True),
        Conversation(many),
        Conversation(messages[1:], tools=tools),
    ):
        plain = [{"role": m.role, "content": m.content} for m in conversation.messages]
        continued = bool(conversation.continue_final_message)
        options: dict[str, Any] = {"continue_final_message": continued, "add_generation_prompt": not continued}
        expected = text.chat_template.render(plain, tools=conversation.tools, **options)
        assert asyncio.run(renderer.render(conversation)) == expected
    wrong = Conversation(messages, variables={"colour": "red"})
    assert "colour" in error_of(lambda: asyncio.run(renderer.render(wrong))).message


def test_an_error_about_a_large_body_is_the_one_that_a_small_one_gets(readers: LargeRequestReaders) -> None:
    def check(raw: bytes) -> None:
        asyncio.run(readers.ask(CheckBody.of(raw, ChatRequest, OPENAI_FIELDS)))

    check(b'{"messages": [], "user": null, "tools": []}')
    wrong_type = error_of(lambda: check(b'{"messages": [{"role": "user", "content": 5}]}'))
    assert (wrong_type.param, wrong_type.status) == ("messages[0].content", 400)
    unserved = error_of(lambda: check(b'{"messages": [], "modalities": ["audio"]}'))
    assert (type(unserved), unserved.param, unserved.code) == (UnsupportedField, "modalities", "unsupported_parameter")
    assert "'modalities' is not supported yet" in unserved.message
    with pytest.raises(RequestError, match="not valid JSON"):
        asyncio.run(readers.ask(CheckBody.of(b"{", None, NO_FIELDS)))
    with pytest.raises(RequestError, match="nested too deeply"):
        check(b'{"x": ' + b"[" * 200_000)


def test_a_server_answers_large_requests_as_small_ones(server: Server) -> None:
    small = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "temperature": 0}
    large = small | {"user": "u" * LARGE_BYTES}
    for path in ("/v1/chat/completions", "/invocations"):
        answers = [server.post(path, body).json()["choices"] for body in (small, large)]
        assert answers[0] == answers[1], path
    refused = server.post("/v1/completions", {"prompt": [5] * LARGE_BYTES, "max_tokens": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    refused = server.post("/v1/completions", {"prompt": "a", "stop_token_ids": ["x"] * LARGE_BYTES})
    assert "values that are wrong" in refused.json()["error"]["message"]


def test_a_reader_that_dies_is_replaced_and_its_request_refused(
    readers: LargeRequestReaders, renderer: PromptRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(renderer.encode(LONG, True, 10**9))
    (idle,) = readers._readers._idle
    os.kill(idle.pid, signal.SIGSTOP)
    receive = idle.channel.receive

    def after_its_death(timeout: float | None) -> Any:
        os.kill(idle.pid, signal.SIGKILL)
        return receive(timeout)

    monkeypatch.setattr(idle.channel, "receive", after_its_death)
    with pytest.raises(RequestError, match="make it smaller"):
        asyncio.run(renderer.encode(LONG, True, 10**9))
    assert len(asyncio.run(renderer.encode(LONG, True, 10**9))) > 1_000
    assert idle not in readers._readers._idle
    assert readers._waiting_bytes == 0


def test_a_piece_that_takes_too_long_is_given_up(
    readers: LargeRequestReaders, renderer: PromptRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(renderer.encode(LONG, True, 10**9))
    (idle,) = readers._readers._idle
    monkeypatch.setattr(module, "WORK_SECONDS", 0.1)
    os.kill(idle.pid, signal.SIGSTOP)
    with pytest.raises(RequestError, match="make it smaller"):
        asyncio.run(renderer.encode(LONG, True, 10**9))
    assert not idle.alive


def test_what_waits_to_be_read_is_bounded_and_a_client_that_leaves_frees_its_part(
    readers: LargeRequestReaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 3 * len(LONG))
    may_answer = threading.Event()
    answer = readers._answer

    def slow(task: Any) -> Any:
        may_answer.wait(20)
        return answer(task)

    monkeypatch.setattr(readers, "_answer", slow)

    async def work() -> None:
        waiting = [asyncio.ensure_future(readers.ask(Encode(LONG))) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError) as refused:
            await readers.ask(Encode(LONG))
        assert refused.value.retry_after_s > 0
        if readers._threads._max_workers < 3:  # the last one has not begun
            waiting.pop().cancel()
            while readers._waiting_bytes > 2 * len(LONG):
                await asyncio.sleep(0)
            waiting.append(asyncio.ensure_future(readers.ask(Encode(LONG))))
        may_answer.set()
        assert len({len(answer.tokens) for answer in await asyncio.gather(*waiting)}) == 1

    asyncio.run(work())
    assert readers._waiting_bytes == 0
