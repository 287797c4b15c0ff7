"""What tests of the router share."""

from __future__ import annotations

import pytest

from quire.foundation.processes import garbage


@pytest.fixture(autouse=True)
def _own_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that starts changes how its process collects garbage: the tests' own process stays as it is."""
    monkeypatch.setattr(garbage, "begin_serving", lambda: None)
    monkeypatch.setattr(garbage, "collect_in_calm", lambda open_sequences: None)
