"""Responses that are kept and go on, and those that are made in the background, with the official client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai.types.responses import Response, ResponseItemList

from tests.api.openai_types import check, unknown_fields
from tests.api.responses.wire import TEXT_EVENTS, checked_events, connect, events_of, kinds
from tests.api.server import Server, running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return connect(server)


# --- kept -----------------------------------------------------------------------------------------------------------


def test_a_response_is_kept_continued_listed_and_deleted(client: openai.OpenAI, server: Server) -> None:
    first = client.responses.create(model="tiny", input="one", max_output_tokens=3, instructions="brief")
    again = client.responses.retrieve(first.id)
    assert again == first
    raw = server.get(f"/v1/responses/{first.id}").json()
    assert unknown_fields(check(Response, raw)) == []
    second = client.responses.create(
        model="tiny", input="two", previous_response_id=first.id, max_output_tokens=3, extra_body={"seed": 2}
    )
    assert second.previous_response_id == first.id
    by_hand = client.responses.create(
        model="tiny",
        input=[
            {"role": "user", "content": "one"},
            *first.output,  # type: ignore[list-item]
            {"role": "user", "content": "two"},
        ],
        max_output_tokens=3,
        extra_body={"seed": 2},
    )
    assert second.output_text == by_hand.output_text
    assert second.usage == by_hand.usage or second.usage.input_tokens == by_hand.usage.input_tokens  # type: ignore[union-attr]
    raw = server.get(f"/v1/responses/{second.id}/input_items").json()
    assert unknown_fields(check(ResponseItemList, raw)) == []
    listed = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    assert [item.role for item in listed] == ["user", "assistant", "user"]  # type: ignore[union-attr]
    assert listed[1].content[0].text == first.output_text  # type: ignore[union-attr]
    client.responses.delete(first.id)
    for lost in (lambda: client.responses.retrieve(first.id), lambda: client.responses.delete(first.id)):
        with pytest.raises(openai.NotFoundError):
            lost()
    with pytest.raises(openai.NotFoundError, match=first.id) as error:
        client.responses.create(model="tiny", input="three", previous_response_id=second.id)
    assert error.value.param == "previous_response_id"


def test_a_streamed_response_is_continued_at_once(client: openai.OpenAI) -> None:
    previous, turns = None, []
    for _ in range(5):
        with client.responses.stream(
            model="tiny", input="x", max_output_tokens=2, previous_response_id=previous
        ) as stream:  # type: ignore[call-overload]
            for event in stream:
                if event.type == "response.incomplete":
                    previous = event.response.id
                    turns.append(event.response.usage.input_tokens)
    assert turns == sorted(set(turns))


def test_what_is_not_to_be_kept_is_not(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="hi", max_output_tokens=1, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_responses_outlive_a_restart(tmp_path: Path) -> None:
    with running(tmp_path) as server, connect(server) as client:
        first = client.responses.create(model="tiny", input="one", max_output_tokens=3)
    with running(tmp_path) as server, connect(server) as client:
        assert client.responses.retrieve(first.id) == first
        assert client.responses.create(model="tiny", input="x", previous_response_id=first.id, max_output_tokens=1).id


def test_without_a_store_answers_go_on_and_nothing_is_kept(tmp_path: Path) -> None:
    with running(tmp_path, disable_responses_store=True) as server, connect(server) as client:
        assert client.responses.create(model="tiny", input="hi", max_output_tokens=1).output_text
        assert client.responses.create(model="tiny", input="hi", max_output_tokens=1, store=True).output_text
        for refused in ({"previous_response_id": "resp_1"}, {"background": True}):
            with pytest.raises(openai.BadRequestError, match="--disable-responses-store"):
                client.responses.create(model="tiny", input="hi", **refused)  # type: ignore[call-overload]


def test_a_full_store_does_not_cost_the_answer(tmp_path: Path) -> None:
    with running(tmp_path, responses_store_max_bytes=2**17) as server, connect(server) as client:
        answer = client.responses.create(model="tiny", input="x" * 300, max_output_tokens=1, metadata={"a": "b" * 500})
        assert answer.output_text
        server.in_loop(server.session.wait_ready())


# --- in the background ----------------------------------------------------------------------------------------------


def wait_for(client: openai.OpenAI, name: str) -> Response:
    for _ in range(3_000):
        answer = client.responses.retrieve(name)
        if answer.status not in ("queued", "in_progress"):
            return answer
        time.sleep(0.02)
    raise AssertionError(answer)


def test_a_response_in_the_background(client: openai.OpenAI, server: Server) -> None:
    queued = client.responses.create(model="tiny", input="hi", max_output_tokens=5, background=True)
    assert queued.status == "queued"
    done = wait_for(client, queued.id)
    assert done.status == "incomplete"
    assert len(done.output_text) == 5
    server.assert_all_free()


def test_events_of_the_background_are_streamed_and_read_again(client: openai.OpenAI, server: Server) -> None:
    events = events_of(server, {"input": "hi", "max_output_tokens": 8, "background": True})
    assert kinds(events) == ["response.created", "response.queued", *TEXT_EVENTS[1:], "response.incomplete"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    name = events[0]["response"]["id"]
    raw = server.get(f"/v1/responses/{name}?stream=true&starting_after=3").text
    assert checked_events(raw) == events[4:]
    again = list(client.responses.retrieve(name, stream=True))
    assert [event.sequence_number for event in again] == list(range(len(events)))


def test_a_reader_joins_while_it_runs(tmp_path: Path) -> None:
    with running(tmp_path, step_s=0.02) as server, connect(server) as client:
        queued = client.responses.create(model="tiny", input="hi", max_output_tokens=40, background=True)
        events = list(client.responses.retrieve(queued.id, stream=True))
        assert events[-1].type == "response.incomplete"
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == wait_for(
            client, queued.id
        ).output_text  # fmt: skip


def test_the_background_is_cancelled(tmp_path: Path) -> None:
    with running(tmp_path, step_s=0.02) as server, connect(server) as client:
        queued = client.responses.create(model="tiny", input="hi", background=True)
        assert client.responses.cancel(queued.id).status == "cancelled"
        assert client.responses.cancel(queued.id).status == "cancelled"
        server.assert_all_free()
        assert client.responses.retrieve(queued.id).status == "cancelled"
        deleted = client.responses.create(model="tiny", input="hi", background=True)
        client.responses.delete(deleted.id)
        server.assert_all_free()


def test_only_the_background_is_cancelled_and_streamed_again(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="hi", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(answer.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        list(client.responses.retrieve(answer.id, stream=True))


def test_the_background_of_a_server_that_ended_has_failed(tmp_path: Path) -> None:
    with running(tmp_path, step_s=0.05) as server, connect(server) as client:
        queued = client.responses.create(model="tiny", input="hi", background=True)
        while client.responses.retrieve(queued.id).status == "queued":
            time.sleep(0.02)
    with running(tmp_path) as server, connect(server) as client:
        answer = client.responses.retrieve(queued.id)
        assert answer.status == "failed"
        assert answer.error is not None
        assert answer.error.code == "server_error"
        raw = server.get(f"/v1/responses/{queued.id}").json()
        assert unknown_fields(check(Response, raw)) == []
        events = checked_events(server.get(f"/v1/responses/{queued.id}?stream=true").text)
        assert events[-1]["type"] == "response.failed"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        with pytest.raises(openai.BadRequestError, match="cannot be continued"):
            client.responses.create(model="tiny", input="x", previous_response_id=queued.id)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(server: Server) -> Iterator[None]:
    yield
    server.assert_all_free()
