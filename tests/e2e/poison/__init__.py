"""Poison: requests that are wrong, huge, slow or no HTTP at all, and what each must get from a server on Quill."""

from __future__ import annotations

from tests.e2e.poison.bodies import BODIES
from tests.e2e.poison.fields import FIELDS
from tests.e2e.poison.floods import FLOODS
from tests.e2e.poison.poison import Poison
from tests.e2e.poison.wire import WIRE

CORPUS: tuple[Poison, ...] = (*BODIES, *FIELDS, *FLOODS, *WIRE)
