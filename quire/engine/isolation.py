"""Requests that run alone, because engines have died while they worked on them.

An API process sets `Add.alone` for a prompt that was in flight at two deaths. Until each of its sequences has brought
that many tokens, no step has a row of another prompt, so one more death has one explanation. All other requests wait,
whichever process they come from; several that are to run alone do so one after the other.
"""

from __future__ import annotations

from quire.foundation.messages.to_engine import Add
from quire.scheduling.scheduler.scheduler import Scheduler

_OTHERS = "the end of what runs alone"


class Isolation:
    """The requests of one engine that run alone, and those that wait for them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._suspects: dict[int, list[int]] = {}  # sequences that have not run alone yet, by their prompt's first one
        self._current: list[int] = []  # sequences of the prompt that runs alone
        self._holding = False

    def awaits(self, sequence: Add) -> tuple[str, ...]:
        """What a new sequence awaits: its own time alone, or the end of another's."""
        if sequence.alone:
            self._suspects.setdefault(sequence.prompt_id, []).append(sequence.id)
            return (_OTHERS,)
        return (_OTHERS,) if self._holding else ()

    def update(self) -> None:
        """Let the next prompt run alone once the one before has brought its tokens; after the last, all go on."""
        if not self._suspects and not self._holding:
            return
        if any(self._is_short(number) for number in self._current):
            return
        self._current = []
        suspect = self._next_suspect()
        if suspect is None:
            self._release_others()
            return
        self._holding = True
        self._scheduler.hold_all(_OTHERS)
        if not self._scheduler.steps_in_flight:
            self._current = self._suspects.pop(suspect)
            for number in self._current:
                self._scheduler.arrived(number, _OTHERS)

    def _is_short(self, number: int) -> bool:
        request = self._scheduler.get(number)
        return request is not None and len(request.tokens) - len(request.add.tokens) < request.add.alone

    def _next_suspect(self) -> int | None:
        """The next prompt that could run alone. One that awaits more, such as its grammar, keeps nobody waiting."""
        for prompt, numbers in list(self._suspects.items()):
            requests = [request for number in numbers if (request := self._scheduler.get(number)) is not None]
            if not requests:
                del self._suspects[prompt]
            elif all(request.awaits == {_OTHERS} for request in requests):
                return prompt
        return None

    def _release_others(self) -> None:
        self._holding = False
        waiting = {number for numbers in self._suspects.values() for number in numbers}
        for request in list(self._scheduler.requests()):
            if request.id not in waiting:
                self._scheduler.arrived(request.id, _OTHERS)
