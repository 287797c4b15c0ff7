"""What is in the store: it survives a restart and two writers, stays within its bounds, and no broken file stops it."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from quire.errors import ConfigError, PayloadTooLarge, RequestError
from quire.serving.store.limits import PROCESS_DEAD_S, StoreFullError, UnknownIdError
from quire.serving.store.store import Store
from tests.store.contents import LIMITS, Time, ids, parts, response, run

# --- the file -------------------------------------------------------------------------------------------------------


def test_what_was_written_is_there_after_a_restart(path: Path) -> None:
    first = Store(path, LIMITS)
    run(first.responses.put(response("resp_1")))
    first.close()
    second = Store(path, LIMITS)
    assert run(second.responses.get("resp_1")).body == b"x" * 10
    second.close()


def test_only_the_owner_may_read_it(path: Path) -> None:
    store = Store(path, LIMITS)
    before = os.umask(0)
    try:
        run(store.responses.put(response("resp_1")))
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()}
    assert modes == dict.fromkeys(("store.sqlite", "store.sqlite-wal", "store.sqlite-shm", "store.sqlite.lock"), 0o600)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    store.close()


def test_nothing_is_written_before_the_first_use(path: Path) -> None:
    store = Store(path, LIMITS)
    store.close()
    assert not path.parent.exists()


def test_a_file_that_is_no_database_is_moved_aside(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database" * 1000)
    store = Store(path, LIMITS)
    run(store.responses.put(response("resp_1")))
    assert run(store.responses.get("resp_1")).id == "resp_1"
    (aside,) = path.parent.glob("store.sqlite.broken-*")
    assert aside.read_bytes().startswith(b"not a database")
    assert "is broken" in caplog.text
    assert str(aside) in caplog.text
    store.close()


def test_a_file_that_breaks_while_it_is_open_is_moved_aside(path: Path) -> None:
    first = Store(path, LIMITS)
    run(*(first.responses.put(response(f"resp_{i}", 20_000)) for i in range(20)))
    first.close()
    with path.open("r+b") as file:  # the header stays, so that it opens
        file.seek(4096)
        file.write(b"\xff" * 200_000)
    stores = [Store(path, LIMITS), Store(path, LIMITS)]
    for number, store in enumerate(stores):
        run(store.responses.put(response(f"later_{number}")))
    for store in stores:
        assert run(store.responses.get("later_0"), store.responses.get("later_1")).id == "later_1"
        store.close()
    assert len([p for p in path.parent.glob("store.sqlite.broken-*") if p.name[-1].isdigit()]) == 1


def test_a_newer_stores_file_is_left_alone(path: Path) -> None:
    store = Store(path, LIMITS)
    run(store.responses.put(response("resp_1")))
    store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    newer = Store(path, LIMITS)
    with pytest.raises(ConfigError, match="newer version"):
        newer.open_now()
    newer.close()
    assert not list(path.parent.glob("*.broken*"))


def test_a_path_that_cannot_be_used_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "store.sqlite", LIMITS)
    with pytest.raises(ConfigError, match="--responses-store-path"):
        store.open_now()
    store.close()


def test_a_store_that_is_opened_leaves_the_locks_of_its_process_alone(path: Path) -> None:
    """Another process would take the file for nobody's, and remove what its connections share."""
    stores = [Store(path, LIMITS), Store(path, LIMITS)]
    for store in stores:
        store.open_now()
    alone = "import sqlite3, sys; print(*sqlite3.connect(sys.argv[1], timeout=0).execute('PRAGMA journal_mode=DELETE'))"
    other = subprocess.run([sys.executable, "-c", alone, str(path)], capture_output=True, text=True)
    assert "database is locked" in other.stderr, other.stdout
    for store in stores:
        store.close()


def test_two_processes_write_at_once(path: Path) -> None:
    code = """
import asyncio, sys
from pathlib import Path
from quire.serving.store.limits import StoreLimits
from quire.serving.store.responses import StoredResponse
from quire.serving.store.store import Store
async def main():
    store = Store(Path(sys.argv[1]), StoreLimits(2**24, 1000.0, 2**20))
    for i in range(150):
        await store.responses.put(StoredResponse(f"{sys.argv[2]}_{i}", "completed", b"[]", b"x" * 3000, None))
        assert await store.responses.update(f"{sys.argv[2]}_{i}", "completed", b"y", [(0, b"a"), (1, b"b")])
    store.close()
asyncio.run(main())
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in "ab"]
    assert [writer.wait(240) for writer in writers] == [0, 0]
    store = Store(path, LIMITS)
    for name in "ab":
        for i in range(150):
            assert run(store.responses.get(f"{name}_{i}")).body == b"y"
    store.close()


# --- bounds ---------------------------------------------------------------------------------------------------------


def test_the_responses_unused_for_longest_are_evicted_and_the_file_stays_small(path: Path) -> None:
    time = Time()
    store = Store(path, LIMITS, time)

    async def fill() -> None:
        for i in range(100):
            time.value += 1
            await store.responses.put(response(f"resp_{i}", 100_000))
            await store.responses.turns("resp_0")  # is used all the time

    run(fill())
    assert run(store.responses.get("resp_0")).id == run(store.responses.get("resp_99")).id.replace("99", "0")
    with pytest.raises(UnknownIdError):
        run(store.responses.get("resp_1"))
    assert path.stat().st_size < LIMITS.max_bytes * 1.3
    store.close()


def test_what_still_runs_is_not_evicted(path: Path) -> None:
    store = Store(path, LIMITS)
    run(store.responses.put(response("running", 100_000, "in_progress"), running=True))
    run(*(store.responses.put(response(f"resp_{i}", 100_000)) for i in range(60)))
    assert run(store.responses.get("running")).status == "in_progress"
    store.close()


def test_a_file_takes_the_room_of_responses_and_is_refused_when_there_is_none(path: Path) -> None:
    store = Store(path, LIMITS)
    run(*(store.responses.put(response(f"resp_{i}", 100_000)) for i in range(30)))
    megabyte = [b"z" * 2**18] * 4
    run(*(store.files.create(f"{i}", "batch", parts(*megabyte[:3])) for i in range(4)))
    with pytest.raises(StoreFullError, match="--responses-store-max-bytes"):
        run(store.files.create("5", "batch", parts(*megabyte)))
    kept = run(ids(store))
    assert len(kept) == 4  # nothing is left of the one that did not fit
    run(store.files.delete(kept[0]))
    run(store.files.create("6", "batch", parts(*megabyte[:3])))
    store.close()


def test_a_file_may_not_be_larger_than_its_limit(path: Path) -> None:
    store = Store(path, LIMITS)
    with pytest.raises(PayloadTooLarge, match="1048576"):
        run(store.files.create("a", "batch", parts(b"x" * 2**20, b"x")))
    assert run(ids(store)) == []
    store.close()


def test_what_is_too_old_goes(path: Path) -> None:
    time = Time()
    store = Store(path, LIMITS, time)
    run(store.responses.put(response("old")))
    run(store.files.create("old", "batch", parts(b"x")))
    short = run(store.files.create("short", "batch", parts(b"x"), 10.0))
    assert short.expires == short.created + 10
    time.value += 11
    run(store.sweep())
    with pytest.raises(UnknownIdError):
        run(store.files.get(short.id))
    time.value += LIMITS.max_age
    run(store.responses.put(response("new")), store.sweep())
    with pytest.raises(UnknownIdError):
        run(store.responses.get("old"))
    assert run(store.responses.get("new")).id == "new"
    assert run(ids(store)) == []
    store.close()


# --- responses ------------------------------------------------------------------------------------------------------


def test_turns_come_in_order_and_a_missing_one_is_said(path: Path) -> None:
    store = Store(path, LIMITS)
    run(*(store.responses.put(response(f"r{i}", previous=f"r{i - 1}" if i else None)) for i in range(3)))
    assert [each.id for each in run(store.responses.turns("r2"))] == ["r0", "r1", "r2"]
    run(store.responses.delete("r1"))
    with pytest.raises(UnknownIdError, match="'r1'") as error:
        run(store.responses.turns("r2"))
    assert error.value.param == "previous_response_id"
    store.close()


def test_a_conversation_is_never_cut_in_silence(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.serving.store.responses.MAX_TURNS", 3)
    store = Store(path, LIMITS)
    run(*(store.responses.put(response(f"r{i}", previous=f"r{i - 1}" if i else None)) for i in range(4)))
    assert len(run(store.responses.turns("r2"))) == 3
    with pytest.raises(RequestError, match="more than 3 turns"):
        run(store.responses.turns("r3"))
    store.close()


def test_events_follow_until_the_response_ends(path: Path) -> None:
    store = Store(path, LIMITS)
    run(store.responses.put(response("r", status="queued"), running=True))
    assert run(store.responses.update("r", "in_progress", b"{}", [(0, b"zero"), (1, b"one")]))
    assert run(store.responses.events("r", -1)).events == [(0, b"zero"), (1, b"one")]
    assert not run(store.responses.events("r", -1)).last
    assert run(store.responses.update("r", "completed", b"{}", [(2, b"two")]))
    later = run(store.responses.events("r", 0))
    assert (later.events, later.last) == ([(1, b"one"), (2, b"two")], True)
    store.close()


def test_a_cancelled_response_is_not_wanted_any_more(path: Path) -> None:
    store, other = Store(path, LIMITS), Store(path, LIMITS)
    run(store.responses.put(response("r", status="queued"), running=True))
    run(other.responses.end("r", "cancelled", b"cancelled"))
    assert not run(store.responses.update("r", "completed", b"done"))
    assert run(store.responses.get("r")).body == b"cancelled"
    store.close()
    other.close()


def test_a_response_whose_process_is_gone_is_abandoned(path: Path) -> None:
    time = Time()
    store = Store(path, LIMITS, time)
    run(store.responses.put(response("r", status="in_progress"), running=True))
    time.value += PROCESS_DEAD_S - 1
    assert not run(store.responses.get("r")).abandoned
    run(store.responses.update("r", "in_progress", None))
    time.value += PROCESS_DEAD_S - 1
    assert not run(store.responses.get("r")).abandoned
    time.value += 2
    assert run(store.responses.get("r")).abandoned
    store.close()
