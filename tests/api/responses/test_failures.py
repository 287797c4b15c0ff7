"""/v1/responses while something fails inside: streams and the background end with `response.failed`."""

from __future__ import annotations

import threading

import openai
import pytest

from quire.foundation.messages.from_engine import Deltas, End
from tests.api.responses.wire import checked_events, connect
from tests.api.scripted import ScriptedClient
from tests.api.server import Server


def fail(client: ScriptedClient) -> None:
    """The engine sends a token and gives the request up."""
    (add,) = client.wait_for_adds(1)
    client.tokens(add, [70])
    client.say(Deltas([], [], [], ends=[End(add.id, "error", "The logits are NaN.")]))


def test_a_stream_ends_with_the_failure(scripted: tuple[Server, ScriptedClient]) -> None:
    server, client = scripted
    with server.http.stream("POST", server.url + "/v1/responses", json={"input": "hi", "stream": True}) as answer:
        fail(client)
        events = checked_events("".join(answer.iter_text()))
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.failed"
    assert (last["status"], last["error"]["code"], last["error"]["message"]) == (
        "failed", "server_error", "The logits are NaN.",
    )  # fmt: skip
    assert last["output"][0]["status"] == "incomplete"
    assert events[-2]["type"] == "response.output_item.done"


def test_the_background_keeps_the_failure(scripted: tuple[Server, ScriptedClient]) -> None:
    server, client = scripted
    openai_client = connect(server)
    queued = openai_client.responses.create(model="tiny", input="hi", background=True)
    fail(client)
    events = list(openai_client.responses.retrieve(queued.id, stream=True))
    assert events[-1].type == "response.failed"
    failed = openai_client.responses.retrieve(queued.id)
    assert failed.error is not None
    assert failed.error.message == "The logits are NaN."
    client.adds.clear()
    threading.Thread(target=lambda: fail(client)).start()
    with pytest.raises(openai.InternalServerError, match="NaN"):
        openai_client.responses.create(model="tiny", input="hi")
