"""Two servers over one store, as several API processes are: the other reads, continues and cancels what one made."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.api.responses.wire import connect
from tests.api.server import Server, running


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    store = str(tmp_path / "store.sqlite")
    with (
        running(tmp_path / "a", step_s=0.02, responses_store_path=store) as first,
        running(tmp_path / "b", responses_store_path=store) as second,
    ):
        yield first, second


def test_the_other_reads_streams_and_continues(servers: tuple[Server, Server]) -> None:
    first, second = map(connect, servers)
    queued = first.responses.create(model="tiny", input="hi", max_output_tokens=30, background=True)
    events = list(second.responses.retrieve(queued.id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"
    done = second.responses.retrieve(queued.id)
    assert done == first.responses.retrieve(queued.id)
    again = second.responses.create(model="tiny", input="x", previous_response_id=queued.id, max_output_tokens=1)
    assert first.responses.retrieve(again.id).previous_response_id == queued.id


def test_the_other_cancels_and_deletes(servers: tuple[Server, Server]) -> None:
    first, second = map(connect, servers)
    for end in (second.responses.cancel, second.responses.delete):
        queued = first.responses.create(model="tiny", input="hi", background=True)
        while servers[0].session.num_sequences == 0:
            time.sleep(0.01)
        end(queued.id)
        servers[0].assert_all_free()
    with pytest.raises(openai.NotFoundError):
        first.responses.retrieve(queued.id)
