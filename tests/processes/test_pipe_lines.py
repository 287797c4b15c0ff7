"""Lines through a pipe that is smaller than they are."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from quire.foundation.processes.pipe_lines import MAX_UNSENT_BYTES, LineReader, LineWriter, decoded, wait_readable

WAIT_S = 60.0
LONG = b"x" * 1_000_000


@contextmanager
def pipe() -> Iterator[tuple[LineWriter, LineReader]]:
    """Both ends."""
    read, write = os.pipe()
    reader, writer = LineReader(read), LineWriter(write)
    try:
        yield writer, reader
    finally:
        writer.close()
        reader.close()


def lines_of(reader: LineReader, count: int) -> list[bytes]:
    """So many, in the order in which they come."""
    lines: list[bytes] = []
    while len(lines) < count:
        wait_readable(reader.fd)
        lines += reader.read()
    return lines


def test_lines_larger_than_the_pipe_arrive_whole_and_in_order() -> None:
    sent = [b"before", LONG, b"between", LONG + b"y", b"after"]
    with pipe() as (writer, reader):
        for line in sent:
            writer.send(line)
        assert lines_of(reader, len(sent)) == sent


def test_a_line_that_has_not_arrived_whole_is_not_read() -> None:
    read, write = os.pipe()
    reader = LineReader(read)
    os.write(write, b"its beginning")
    assert reader.read() == []
    os.write(write, b" and its end\nthe next")
    assert reader.read() == [b"its beginning and its end"]
    os.close(write)
    reader.close()


def test_flush_waits_until_all_is_sent() -> None:
    with pipe() as (writer, reader):
        writer.send(LONG)
        found: list[bytes] = []
        reading = threading.Thread(target=lambda: found.extend(lines_of(reader, 2)))
        reading.start()
        writer.flush(WAIT_S)
        writer.send(b"")  # what the reader waits for
        reading.join(WAIT_S)
        assert found == [LONG, b""]


def test_the_pipe_is_closed_once_all_is_sent() -> None:
    with pipe() as (writer, reader):
        writer.send(LONG)
        writer.end()
        assert lines_of(reader, 1) == [LONG]
        wait_readable(reader.fd)
        assert os.read(reader.fd, 1) == b""


def test_a_reader_that_reads_nothing_costs_a_bounded_memory_and_gets_whole_lines() -> None:
    number = 3 * MAX_UNSENT_BYTES // len(LONG)
    with pipe() as (writer, reader):
        for _ in range(number):
            writer.send(LONG)
        writer.end()
        lines = []
        while chunk := (wait_readable(reader.fd) and os.read(reader.fd, 1 << 16)):
            lines.append(chunk)
        whole = b"".join(lines).splitlines()
    assert set(whole) == {LONG}
    assert MAX_UNSENT_BYTES <= len(whole) * len(LONG) <= MAX_UNSENT_BYTES + 2 * len(LONG)


def test_a_reader_that_is_gone_is_no_error() -> None:
    read, write = os.pipe()
    writer = LineWriter(write)
    writer.send(LONG)
    os.close(read)
    writer.flush(WAIT_S)
    writer.send(b"nobody")
    writer.close()


def test_a_pipe_that_is_closed_before_its_thread_begins_is_no_error() -> None:
    with pipe() as (writer, _):
        writer.close()
        writer._write_rest()  # what the thread does


@pytest.mark.parametrize("broken", [b'{"a": 1', b'{"a": "x"}', b'"\xff"', b""])
def test_a_line_that_is_no_message_leaves_the_others(broken: bytes, caplog: pytest.LogCaptureFixture) -> None:
    lines = [b'{"a":1}', broken, b'{"a":2}']
    assert decoded(lines, msgspec.json.Decoder(dict[str, int]), "A line") == [{"a": 1}, {"a": 2}]
    assert "A line cannot be read, and is left out" in caplog.text
