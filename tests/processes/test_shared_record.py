"""What a process has written others read, also when it was killed while it wrote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from quire.foundation.processes.shared_record import _PLACES, SharedRecord

_WRITER = """
import sys
from pathlib import Path
from quire.foundation.processes.shared_record import SharedRecord

record, number = SharedRecord(Path(sys.argv[1])), 0
while True:
    number += 1
    record.write(b"%d:" % number * 20_000)
"""


def test_the_last_version_is_read_also_by_who_comes_later(tmp_path: Path) -> None:
    record, reader = SharedRecord(tmp_path / "record"), SharedRecord(tmp_path / "record")
    assert reader.read() == b""
    for version in (b"one", b"second", b"3"):
        record.write(version)
        assert reader.read() == record.read() == version
    successor = SharedRecord(tmp_path / "record")
    successor.write(b"four")
    assert reader.read() == b"four"


def test_a_version_that_was_cut_off_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "record"
    record = SharedRecord(path)
    record.write(b"whole")
    record.write(b"newer, but broken below")
    with path.open("r+b") as file:  # in place: it is long, and nearly all of it is a hole
        for place in _PLACES:
            file.seek(place)
            data = file.read(64)
            file.seek(place)
            file.write(data.replace(b"broken", b"brokem"))
    assert SharedRecord(path).read() == b"whole"


def test_a_writer_that_is_killed_leaves_a_whole_version(tmp_path: Path) -> None:
    path, seen = tmp_path / "record", 0
    for _ in range(5):
        writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)])
        deadline = time.monotonic() + 120
        reader = SharedRecord(path)
        while int(reader.read().split(b":")[0] or 0) <= 3:
            assert time.monotonic() < deadline
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        data = reader.read()
        number = data.split(b":")[0]
        assert data == number + b":" + data[len(number) + 1 :]
        assert data == (number + b":") * 20_000
        seen += 1
        path.unlink()
    assert seen == 5
