"""/v1/batches with the official client: states, results, cancelling, and a server that ends in the middle."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from quire.errors import UnavailableError
from quire.serving.dialects.batches import runner
from quire.serving.dialects.batches.requests import parse_line
from quire.serving.store import database
from quire.serving.store.batches import BatchStore
from tests.api.openai_types import check, unknown_fields
from tests.api.server import Pace, Server, count_up, running

ENDED = ("completed", "failed", "expired", "cancelled")


def connect(server: Server, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("batches"), api_key=("a key",)) as server:
        yield server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return connect(server, "a key")


def line(name: str, body: Any, url: str = "/v1/completions", **others: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body, **others})


def completions(count: int, **body: Any) -> list[str]:
    return [line(f"request {i}", {"prompt": chr(97 + i % 20), "max_tokens": 3, **body}) for i in range(count)]


def start(client: openai.OpenAI, lines: list[str], endpoint: Any = "/v1/completions", **options: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(
        **{"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h", **options}
    )


def wait(client: openai.OpenAI, batch: Batch, until: Callable[[Batch], bool] = lambda b: b.status in ENDED) -> Batch:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if until(batch := client.batches.retrieve(batch.id)):
            return batch
        time.sleep(0.02)
    raise AssertionError(batch)


def results(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    assert file is not None
    return [json.loads(each) for each in client.files.content(file).text.splitlines()]


def test_a_batch_of_completions(client: openai.OpenAI, server: Server) -> None:
    batch = start(client, completions(40), metadata={"for": "a test"})
    assert batch.status == "validating"
    done = wait(client, batch)
    assert done.status == "completed"
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (40, 40, 0)
    assert done.metadata == {"for": "a test"}
    assert done.error_file_id is None
    assert done.created_at <= (done.in_progress_at or 0) <= (done.finalizing_at or 0) <= (done.completed_at or 0)
    raw = server.get(f"/v1/batches/{batch.id}", headers={"Authorization": "Bearer a key"}).json()
    assert unknown_fields(check(Batch, raw)) == []
    answers = results(client, done.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [f"request {i}" for i in range(40)]  # in the input's order
    for i, answer in enumerate(answers):
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        choice = answer["response"]["body"]["choices"][0]
        assert choice["text"] == "".join(chr(98 + i % 20 + k) for k in range(3))
    assert client.files.retrieve(done.output_file_id or "").purpose == "batch_output"
    server.in_loop(server.session.wait_ready())


def test_a_batch_of_conversations(client: openai.OpenAI) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    done = wait(client, start(client, [line("a", body, "/v1/chat/completions")], "/v1/chat/completions"))
    (answer,) = results(client, done.output_file_id)
    assert answer["response"]["body"]["object"] == "chat.completion"


def test_failed_requests_go_to_the_error_file(client: openai.OpenAI) -> None:
    lines = [line("good", {"prompt": "a", "max_tokens": 1}), line("bad", {"prompt": "a", "temperature": -1})]
    done = wait(client, start(client, lines))
    assert done.status == "completed"
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
    assert [answer["custom_id"] for answer in results(client, done.output_file_id)] == ["good"]
    (error,) = results(client, done.error_file_id)
    assert error["custom_id"] == "bad"
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["param"] == "temperature"


def test_input_that_is_not_requests_fails_as_a_whole(client: openai.OpenAI) -> None:
    good = completions(1)[0]
    lines = [
        good, "no JSON", "[]", good, line("b", 1), line("c", {}, "/v1/models"), line("d", {}, method="GET"),
        json.dumps({"method": "POST"}), line("e", {"stream": True}), "",
    ]  # fmt: skip
    done = wait(client, start(client, lines))
    assert done.status == "failed"
    assert done.failed_at is not None
    assert done.errors is not None
    assert [(error.line, error.code, error.param) for error in done.errors.data or []] == [
        (2, "invalid_json_line", None),
        (3, "invalid_json_line", None),
        (4, "duplicate_custom_id", "custom_id"),
        (5, "missing_required_parameter", "body"),
        (6, "invalid_url", "url"),
        (7, "invalid_method", "method"),
        (8, "missing_required_parameter", "custom_id"),
        (9, "invalid_request", "body.stream"),
    ]
    empty = wait(client, start(client, [""]))
    assert empty.status == "failed"
    assert empty.errors is not None
    assert [error.code for error in empty.errors.data or []] == ["empty_file"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ],
)
def test_what_cannot_be_a_batch_is_refused(client: openai.OpenAI, options: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        start(client, completions(1), **options)
    assert error.value.param == param


def test_an_unknown_file_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.batches.create(input_file_id="file-x", endpoint="/v1/completions", completion_window="24h")
    assert error.value.param == "input_file_id"
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_x")


def test_batches_are_listed_the_latest_first(client: openai.OpenAI) -> None:
    made = [start(client, completions(1)).id for _ in range(3)]
    listed = [batch.id for batch in client.batches.list(limit=2)]
    assert listed[:3] == made[::-1]
    for batch in made:
        wait(client, client.batches.retrieve(batch))


def test_a_batch_is_cancelled_and_keeps_what_it_has(tmp_path: Path) -> None:
    with running(tmp_path, sample=Pace()) as server:
        client = connect(server)
        batch = start(client, completions(400, max_tokens=1))
        wait(client, batch, lambda b: bool(b.request_counts and b.request_counts.completed > 3))
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        done = wait(client, batch)
        assert done.status == "cancelled"
        assert done.cancelled_at is not None
        assert done.request_counts is not None
        assert 3 < done.request_counts.completed < 400
        assert len(results(client, done.output_file_id)) == done.request_counts.completed
        assert client.batches.cancel(batch.id).status == "cancelled"
        server.assert_all_free()


def test_a_batch_goes_on_after_a_restart_and_answers_nothing_twice(tmp_path: Path) -> None:
    with running(tmp_path, sample=Pace()) as server:
        client = connect(server)
        batch = start(client, completions(400, max_tokens=1))
        first = wait(client, batch, lambda b: bool(b.request_counts and b.request_counts.completed > 3))
    assert first.status == "in_progress"
    with running(tmp_path) as server:
        client = connect(server)
        assert client.batches.retrieve(batch.id).request_counts is not None
        done = wait(client, batch)
        assert done.status == "completed"
        answers = results(client, done.output_file_id)
        assert [answer["custom_id"] for answer in answers] == [f"request {i}" for i in range(400)]
        assert done.request_counts is not None
        assert done.request_counts.completed == 400


@pytest.mark.parametrize("write_s", [runner.WRITE_S, 60.0], ids=["as it goes", "all at once"])
def test_a_batch_that_fills_the_store_fails_and_what_it_has_can_be_read_and_deleted(
    tmp_path: Path, write_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "WRITE_S", write_s)
    with running(tmp_path, responses_store_max_bytes=2**18) as server:
        client = connect(server)
        batch = wait(client, start(client, completions(600)))
        assert batch.status == "failed"
        assert batch.errors is not None
        assert "--responses-store-max-bytes" in str((batch.errors.data or [])[0].message)
        found = results(client, batch.output_file_id)
        assert batch.request_counts is not None
        assert 0 < len(found) == batch.request_counts.completed < 600
        with pytest.raises(openai.APIStatusError, match="full"):
            client.files.create(file=("in.jsonl", b"x" * 2**17), purpose="batch")
        for file in list(client.files.list()):
            client.files.delete(file.id)
        client.files.create(file=("in.jsonl", b"x" * 2**17), purpose="batch")


def test_a_line_longer_than_a_request_may_be_is_named(tmp_path: Path) -> None:
    with running(tmp_path, max_request_bytes=1000) as server:
        good, also = completions(2)
        long = line("long", {"prompt": "x" * (1000 + runner.ENVELOPE_BYTES)})
        done = wait(connect(server), start(connect(server), [good, long, also]))
        assert done.status == "failed"
        assert done.errors is not None
        assert [(error.line, error.code) for error in done.errors.data or []] == [(2, "payload_too_large")]
        refused = wait(connect(server), start(connect(server), [good, line("b", {"prompt": "x" * 2000})]))
        assert refused.request_counts is not None
        assert (refused.status, refused.request_counts.failed) == ("completed", 1), "its endpoint refuses it"


def test_lines_are_parsed_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set[threading.Thread]()

    def parse(*arguments: Any) -> Any:
        threads.add(threading.current_thread())
        return parse_line(*arguments)

    monkeypatch.setattr(runner, "parse_line", parse)
    with running(tmp_path) as server:
        assert wait(connect(server), start(connect(server), completions(3))).status == "completed"

        async def own_thread() -> threading.Thread:
            return threading.current_thread()

        assert threads
        assert server.in_loop(own_thread()) not in threads


@pytest.mark.parametrize(("patience_s", "failures"), [(60.0, 2), (0.0, 1)], ids=["tried again", "claimed again"])
def test_a_batch_outlives_a_store_that_cannot_be_used_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float, failures: int
) -> None:
    """Whatever was to be written or read then."""
    monkeypatch.setattr(runner, "PATIENCE_S", patience_s)
    monkeypatch.setattr(runner, "LOOK_S", 0.01)
    monkeypatch.setattr(runner, "WRITE_S", 0.01)
    left = dict.fromkeys(("claim", "begin", "lines_done", "record", "fail", "finish"), failures)

    def locked(name: str) -> None:
        work = getattr(BatchStore, name)

        async def method(store: BatchStore, *arguments: Any) -> Any:
            if left[name]:
                left[name] -= 1
                raise UnavailableError("database is locked")
            return await work(store, *arguments)

        monkeypatch.setattr(BatchStore, name, method)

    for name in left:
        locked(name)
    with running(tmp_path) as server:
        client = connect(server)
        wrong = wait(client, start(client, ["no JSON"]))
        assert wrong.status == "failed"
        assert wrong.errors is not None
        assert [error.code for error in wrong.errors.data or []] == ["invalid_json_line"]
        done = wait(client, start(client, completions(40)))
        assert done.status == "completed"
        assert [answer["custom_id"] for answer in results(client, done.output_file_id)] == [
            f"request {i}" for i in range(40)
        ]
    assert set(left.values()) == {0}


def test_a_lock_at_the_end_of_a_batch_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.01)
    monkeypatch.setattr(runner, "WRITE_S", 0.01)
    pace = Pace()
    with running(tmp_path, sample=pace) as server:
        client = connect(server)
        batch = start(client, completions(5))
        wait(client, batch, lambda b: b.status == "in_progress")
        other = sqlite3.connect(tmp_path / "store" / "store.sqlite", isolation_level=None, timeout=60)
        other.execute("BEGIN IMMEDIATE")
        pace.hurry()
        deadline = time.monotonic() + 60
        while f"Batch {batch.id} waits for the store" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        other.execute("COMMIT")
        other.close()
        done = wait(client, batch)
        assert done.status == "completed"
        assert len(results(client, done.output_file_id)) == 5


def test_interactive_requests_find_room_beside_a_batch(tmp_path: Path) -> None:
    open_ones: list[int] = []

    def counting(history: Sequence[int], drawn: int, vocab_size: int) -> int:
        open_ones.append(server.session.num_sequences)
        return count_up(history, drawn, vocab_size)

    with running(tmp_path, step_s=0.005, sample=counting, max_num_seqs=8) as server:
        client = connect(server)
        assert wait(client, start(client, completions(200, max_tokens=5))).status == "completed"
    assert 2 <= max(open_ones) <= 4


def test_the_requests_of_a_batch_are_those_of_the_key_that_began_it(tmp_path: Path) -> None:
    with running(tmp_path, api_key=("a", "b"), cache_isolation=True) as server:
        prompt = [7] * 100

        def cached(key: str) -> int | None:
            usage = connect(server, key).completions.create(model="tiny", prompt=prompt, max_tokens=1).usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            return usage.prompt_tokens_details.cached_tokens

        batch = start(connect(server, "b"), [line("one", {"prompt": prompt, "max_tokens": 1})])
        done = wait(connect(server, "b"), batch)
        assert done.status == "completed"
        assert not hasattr(done, "tenant")
        assert cached("a") == 0
        assert cached("b")
