"""A batch from file to file: order, resuming, and input that changed or is wrong."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from quire.errors import RequestError
from quire.serving.dialects.batches.file import BatchFile
from quire.serving.dialects.batches.requests import Answer, BatchLine


class Interrupted(Exception):
    """Somebody pressed Ctrl-C."""


class Calls:
    """BatchCalls that answer with the request's own number; the last one that was sent first.

    Attributes:
        asked: Names of the requests that came.
    """

    def __init__(self, fail: tuple[str, ...] = (), stop_after: int | None = None) -> None:
        self.asked: list[str] = []
        self._fail = fail
        self._stop_after = stop_after

    async def wait_for_room(self) -> None:
        if self._stop_after is not None and len(self.asked) >= self._stop_after:
            raise Interrupted
        await asyncio.sleep(0.004)

    async def answer(self, line: BatchLine) -> tuple[str, Answer]:
        self.asked.append(line.custom_id)
        await asyncio.sleep(0.02 / len(self.asked))
        if line.custom_id in self._fail:
            return "id", Answer(400, b'{"error": {"message": "wrong"}}')
        return "id", Answer(
            200, json.dumps({"got": json.loads(line.body)["prompt"], "usage": {"completion_tokens": 2}}).encode()
        )


def request(number: int, **fields: Any) -> str:
    line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": {"prompt": number}}
    return json.dumps(line | fields)


def write(directory: Path, lines: list[str]) -> None:
    (directory / "in.jsonl").write_text("\n".join(lines) + "\n")


def batch_in(directory: Path) -> BatchFile:
    batch = BatchFile(directory / "in.jsonl", directory / "out.jsonl", directory / "out.jsonl.partial")
    batch.check()
    return batch


def run(directory: Path, calls: Calls) -> tuple[BatchFile, int]:
    tokens = 0

    def count(more: int) -> None:
        nonlocal tokens
        tokens += more

    batch = batch_in(directory)
    asyncio.run(batch.run(calls, count))  # type: ignore[arg-type]
    return batch, tokens


def results(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "out.jsonl").read_text().splitlines()]


def test_answers_stand_in_the_order_of_the_requests(tmp_path: Path) -> None:
    write(tmp_path, [request(0), "", *(request(i) for i in range(1, 9))])
    batch, tokens = run(tmp_path, Calls(fail=("r3",)))
    found = results(tmp_path)
    assert [answer["custom_id"] for answer in found] == [f"r{i}" for i in range(9)]
    assert [answer["response"]["body"].get("got") for answer in found] == [0, 1, 2, None, 4, 5, 6, 7, 8]
    assert [answer["error"] is not None for answer in found] == [i == 3 for i in range(9)]
    assert found[3]["response"]["status_code"] == 400
    assert (batch.counts.total, batch.counts.done, batch.counts.failed) == (9, 9, 1)
    assert tokens == 16
    assert not (tmp_path / "out.jsonl.partial").exists()


def interrupted(directory: Path, calls: Calls) -> None:
    with pytest.raises(Interrupted):
        run(directory, calls)
    assert not (directory / "out.jsonl").exists()


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    write(tmp_path, [request(i) for i in range(20)])
    first, second = Calls(fail=("r1",), stop_after=8), Calls()
    interrupted(tmp_path, first)
    done = batch_in(tmp_path).counts.done
    assert 0 < done <= 8
    run(tmp_path, second)
    assert len(second.asked) == 20 - done
    assert "r1" in second.asked  # what had failed is tried again
    assert [answer["response"]["body"].get("got") for answer in results(tmp_path)] == list(range(20))


def test_a_result_that_broke_off_is_asked_again(tmp_path: Path) -> None:
    write(tmp_path, [request(i) for i in range(20)])
    interrupted(tmp_path, Calls(stop_after=8))
    partial = tmp_path / "out.jsonl.partial"
    done = batch_in(tmp_path).counts.done
    partial.write_bytes(partial.read_bytes()[:-10])
    assert batch_in(tmp_path).counts.done == done - 1
    run(tmp_path, Calls())
    assert [answer["response"]["body"]["got"] for answer in results(tmp_path)] == list(range(20))


def test_a_request_that_changed_is_asked_again(tmp_path: Path) -> None:
    write(tmp_path, [request(i) for i in range(20)])
    interrupted(tmp_path, Calls(stop_after=16))
    write(tmp_path, [request(i, body={"prompt": -i}) if i % 2 else request(i) for i in range(10)])
    again = Calls()
    run(tmp_path, again)
    assert {f"r{i}" for i in (1, 3, 5, 7, 9)} <= set(again.asked)
    assert [answer["response"]["body"]["got"] for answer in results(tmp_path)] == [
        -i if i % 2 else i for i in range(10)
    ]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["no", "[]"], "line 1: This line is not valid JSON"),
        ([request(0), request(0)], "line 2: custom_id 'r0' was in line 1"),
        ([request(0), request(0, url="/v1/moderations")], "line 2: custom_id 'r0' was in line 1"),
        ([request(0, url="/v1/moderations")], "line 1: url must be"),
    ],
)
def test_wrong_input_is_said_before_anything_starts(tmp_path: Path, lines: list[str], words: str) -> None:
    write(tmp_path, lines)
    with pytest.raises(RequestError, match=words):
        batch_in(tmp_path)


def test_lines_that_are_no_requests_get_an_error_and_the_others_an_answer(tmp_path: Path) -> None:
    lines = [
        request(0), "no", request(2, url="/v1/moderations"), request(3), request(4, body={"prompt": 4, "stream": True}),
        '{"custom_id": 5}', request(6),
    ]  # fmt: skip
    write(tmp_path, lines)
    calls = Calls()
    batch, tokens = run(tmp_path, calls)
    assert sorted(calls.asked) == ["r0", "r3", "r6"]
    assert (batch.counts.total, batch.counts.done, batch.counts.failed, tokens) == (7, 7, 4, 6)
    assert [line.partition(":")[0] for line in batch.wrong_lines] == ["line 2", "line 3", "line 5", "line 6"]
    found = results(tmp_path)
    assert [answer["custom_id"] for answer in found] == ["r0", None, "r2", "r3", "r4", None, "r6"]
    assert [answer["response"]["status_code"] for answer in found] == [200, 400, 400, 200, 400, 400, 200]
    for number, words in (
        (1, "Line 2: This line is not valid JSON"),
        (2, "Line 3: url must be"),
        (4, "Line 5: stream"),
    ):
        error = found[number]["error"]["error"]
        assert error["message"].startswith(words)
        assert found[number]["response"]["body"]["error"] == error
    assert (found[2]["error"]["error"]["code"], found[2]["error"]["error"]["param"]) == ("invalid_url", "url")


def test_an_interrupted_run_with_wrong_lines_goes_on(tmp_path: Path) -> None:
    write(tmp_path, ["no", *(request(i) for i in range(1, 20))])
    interrupted(tmp_path, Calls(stop_after=8))
    run(tmp_path, Calls())
    assert [answer["custom_id"] for answer in results(tmp_path)] == [None, *(f"r{i}" for i in range(1, 20))]
