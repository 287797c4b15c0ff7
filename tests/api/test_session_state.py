"""Whether requests are taken, by what the engines and the server are doing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest

from quire.serving.api.session.connection import EngineState
from quire.serving.api.session.engines import Engines
from quire.serving.api.session.state import NEW_WORK_WAIT_S, SessionState


@dataclass
class FakeEngines:
    """In place of Engines."""

    state: EngineState = "ready"
    complaint: str = ""
    recovering_s: float = 0.0


def state_of(engines: FakeEngines) -> SessionState:
    return SessionState(cast("Engines", engines))


def test_requests_are_taken_by_engines_that_are_ready_or_will_be_soon() -> None:
    engines = FakeEngines("starting", complaint="loading")
    state = state_of(engines)
    assert not state.takes_requests
    assert state.readiness_complaint == state.health_complaint == "loading"
    engines.state, engines.complaint = "ready", ""
    assert state.takes_requests
    assert state.readiness_complaint == ""
    engines.state = "recovering"
    assert state.takes_requests
    engines.recovering_s = NEW_WORK_WAIT_S
    assert not state.takes_requests


def test_a_server_that_announces_its_end_still_takes_requests() -> None:
    state = state_of(FakeEngines())
    state.announce_shutdown()
    assert state.takes_requests
    assert (state.readiness_complaint, state.health_complaint) == ("the server is shutting down", "")
    state.drain()
    assert (state.current, state.takes_requests, state.drains_on) == ("draining", False, True)
    assert "shutting down" in state.refusal


def test_a_drain_without_an_announcement_says_why() -> None:
    state = state_of(FakeEngines())
    state.drain()
    assert state.readiness_complaint == "the server is shutting down"


def test_a_model_that_is_swapped_out_is_well_and_takes_nothing() -> None:
    engines = FakeEngines()
    state = state_of(engines)
    state.announce_swap()
    assert (state.current, state.takes_requests) == ("ready", True)
    state.retire()
    engines.complaint = "stuck"
    assert (state.current, state.takes_requests, state.health_complaint) == ("swapping", False, "")
    assert "Another model" in state.refusal
    assert state.readiness_complaint == "another model is being loaded"


@pytest.mark.parametrize("retired", [False, True])
def test_dead_engines_are_what_counts(retired: bool) -> None:
    engines = FakeEngines()
    state = state_of(engines)
    if retired:
        state.retire()
    else:
        state.drain()
    engines.state = "dead"
    assert (state.current, state.drains_on) == ("dead", False)


def test_nothing_goes_on_once_the_engines_are_left_alone() -> None:
    state = state_of(FakeEngines())
    state.drain()
    state.closed = True
    assert not state.drains_on
