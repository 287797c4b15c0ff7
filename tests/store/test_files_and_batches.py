"""Files and batches in the store, and whose work a batch is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.errors import RequestError
from quire.serving.store.batch_rows import BatchResult
from quire.serving.store.files import _Lines
from quire.serving.store.limits import PROCESS_DEAD_S, UnknownIdError
from quire.serving.store.store import Store
from tests.store.contents import LIMITS, Time, content, ids, parts, run

# --- files ----------------------------------------------------------------------------------------------------------


def test_a_files_parts_and_lines(path: Path) -> None:
    store = Store(path, LIMITS)
    file = run(store.files.create("in.jsonl", "batch", parts(b"one\ntw", b"o\n\nthree")))
    assert (file.filename, file.purpose, file.size) == ("in.jsonl", "batch", 14)
    assert run(content(store, file.id)) == b"one\ntwo\n\nthree"

    async def lines(max_bytes: int) -> list[tuple[int, bytes]]:
        return [line async for some in store.files.lines(file.id, max_bytes) for line in some]

    assert run(lines(100)) == [(0, b"one"), (1, b"two"), (3, b"three")]
    assert run(lines(3)) == [(0, b"one"), (1, b"two"), (3, b"thre")], "of a longer line one byte more is kept"
    store.close()


def test_a_line_of_many_parts_is_copied_once_and_no_more_of_it_is_kept_than_wanted() -> None:
    lines, part = _Lines(2**20), b"x" * 2**18
    assert [lines.add(part) for _ in range(1000)] == [[]] * 1000
    assert sum(map(len, lines._begun)) == 2**20 + 1
    ((number, line),) = lines.add(b"\n" + part)
    assert (number, len(line)) == (0, 2**20 + 1)
    assert lines.end() == [(1, part)]


def test_pages_of_files(path: Path) -> None:
    store = Store(path, LIMITS)
    made = [run(store.files.create(f"{i}", "user_data" if i == 2 else "batch", parts(b"x"))).id for i in range(5)]

    async def page(after: str | None, order: Any, purpose: str | None = None) -> tuple[list[str], bool]:
        found, more = await store.files.page(purpose=purpose, after=after, limit=2, order=order)
        return [file.id for file in found], more

    assert run(page(None, "desc")) == ([made[4], made[3]], True)
    assert run(page(made[1], "desc")) == ([made[0]], False)
    assert run(page(made[2], "asc")) == ([made[3], made[4]], False)
    assert run(page(made[0], "asc", "batch")) == ([made[1], made[3]], True)
    with pytest.raises(UnknownIdError):
        run(page("nothing", "asc"))
    store.close()


# --- batches --------------------------------------------------------------------------------------------------------


def new_batch(store: Store, model: str = "m") -> str:
    file = run(store.files.create("in", "batch", parts(b"x")))
    made = run(
        store.batches.create(
            model=model, endpoint="/v1/completions", input_file=file.id, window="24h", seconds=86400, metadata=None
        )
    )
    return str(made["id"])


def test_a_batch_is_worked_on_by_one_process_and_goes_on_in_another(path: Path) -> None:
    time = Time()
    first, second = Store(path, LIMITS, time), Store(path, LIMITS, time)
    batch = new_batch(first)
    assert run(first.batches.claim(["other"])) is None
    claimed = run(first.batches.claim(["other", "m"]))
    assert claimed.body["id"] == batch
    assert run(second.batches.claim(["m"])) is None
    assert run(first.batches.claim(["m"])).body["id"] == batch, "a process takes up again what it left in the middle"
    run(first.batches.begin(batch, 3))
    assert run(first.batches.record(batch, [BatchResult(1, True, b"1"), BatchResult(0, False, b"0")])) == "in_progress"
    time.value += PROCESS_DEAD_S + 1  # the first one is killed
    assert run(second.batches.claim(["m"])).body["request_counts"] == {"total": 3, "completed": 1, "failed": 1}
    assert run(second.batches.lines_done(batch)) == {0, 1}
    assert run(first.batches.record(batch, [BatchResult(2, True, b"late")])) == "cancelling"  # not its own any more
    assert run(second.batches.record(batch, [BatchResult(2, True, b"2")])) == "in_progress"
    run(second.batches.finish(batch, "completed"))
    done = run(first.batches.get(batch))
    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert run(content(first, done["output_file_id"])) == b"1\n2\n"
    assert run(content(first, done["error_file_id"])) == b"0\n"
    assert run(first.batches.claim(["m"])) is None
    first.close()
    second.close()


def test_a_batch_that_was_being_finished_is_finished_by_another_process(path: Path) -> None:
    time = Time()
    first, second = Store(path, LIMITS, time), Store(path, LIMITS, time)
    batch = new_batch(first)
    run(first.batches.claim(["m"]))
    run(first.batches.begin(batch, 500))
    run(first.batches.record(batch, [BatchResult(i, True, b"%d" % i) for i in range(500)]))
    steps = 0

    async def die_in_the_middle(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise KeyError
        return await owned(*arguments)

    owned = first.batches._owned
    first.batches._owned = die_in_the_middle  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        run(first.batches.finish(batch, "expired"))
    time.value += PROCESS_DEAD_S + 1
    claimed = run(second.batches.claim(["m"]))
    assert (claimed.body["status"], claimed.ends_as) == ("finalizing", "expired")
    run(second.batches.finish(batch, claimed.ends_as))
    done = run(second.batches.get(batch))
    assert done["status"] == "expired"
    assert done["request_counts"]["completed"] == 500
    assert run(content(second, done["output_file_id"])).split() == [b"%d" % i for i in range(500)]
    first.close()
    second.close()


def test_a_batchs_input_stays_while_it_is_needed(path: Path) -> None:
    store = Store(path, LIMITS)
    batch = new_batch(store)
    (file,) = run(ids(store))
    with pytest.raises(RequestError, match=batch):
        run(store.files.delete(file))
    run(store.batches.cancel(batch))
    run(store.files.delete(file))
    assert run(store.batches.get(batch))["status"] == "cancelling"
    store.close()
