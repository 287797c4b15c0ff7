"""Which requests an engine was working on when it died, written down where a dead process cannot take it along.

The record is a file of the private directory that is mapped into memory: a page that a killed process has written stays
in the file. Each plan costs one copy of its ids.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterable
from pathlib import Path

from quire.foundation.messages.from_engine import EngineId

_WORD = 8
_FINISHED, _HANDLED, _PLACES = 0, 1, 2  # words of the head: the last finished step; a request being added; places


def _path(directory: Path, engine: EngineId) -> Path:
    return directory / f"flight-{engine.engine}-{engine.epoch}"


class FlightRecorder:
    """The engine's side of the record.

    Args:
        places: Largest number of plans in flight.
        rows: Largest number of requests in a plan.
    """

    def __init__(self, directory: Path, engine: EngineId, places: int, rows: int) -> None:
        self._places = places
        self._words = 2 + rows  # of a place: step, number of ids, ids
        size = (3 + places * self._words) * _WORD
        with _path(directory, engine).open("w+b") as file:
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        self._write(_PLACES, [places])

    def handling(self, request: int) -> None:
        """Record that a request is being added; 0 says that none is any more."""
        self._write(_HANDLED, [request])

    def submitted(self, step: int, requests: Iterable[int]) -> None:
        """Record that a plan with these requests is in flight."""
        ids = array("q", requests)
        assert len(ids) <= self._words - 2, "more rows than the engine has slots"
        self._write(3 + step % self._places * self._words, [step, len(ids), *ids])

    def finished(self, step: int) -> None:
        """Record that plans up to this one are no longer in flight."""
        self._write(_FINISHED, [step])

    def _write(self, word: int, values: Iterable[int]) -> None:
        data = array("q", values).tobytes()
        self._memory[word * _WORD : word * _WORD + len(data)] = data


def requests_in_flight(directory: Path, engine: EngineId) -> list[int]:
    """The requests that a dead engine was working on, each once, in ascending order; its record is removed."""
    path = _path(directory, engine)
    try:
        data = path.read_bytes()
    except OSError:
        return []
    path.unlink(missing_ok=True)
    words = array("q", data[: len(data) // _WORD * _WORD])
    if len(words) < 3 or not words[_PLACES]:
        return []
    found = {words[_HANDLED]} - {0}
    size = (len(words) - 3) // words[_PLACES]
    if size < 2:
        return []
    for place in range(3, len(words) - size + 1, size):
        step, count = words[place : place + 2]
        if step > words[_FINISHED] and 0 < count <= size - 2:
            found.update(words[place + 2 : place + 2 + count])
    return sorted(found)
