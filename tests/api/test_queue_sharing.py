"""API processes hear whose requests the others have sent to the queue."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire.errors import OverloadedError
from quire.serving.api import queue_sharing
from quire.serving.api.peers import Peers
from quire.serving.api.queue_sharing import QueueSharing
from tests.api.test_admission_limit import Stage

WAITING = 20


def has_room(stage: Stage, tenant: str) -> bool:
    try:
        stage.limit.check(tenant, 1, 0)
    except OverloadedError:
        return False
    return True


def test_a_tenant_whose_requests_another_process_has_sent_has_no_more_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_sharing, "SHARE_S", 0.001)

    async def body() -> None:
        here, there = Stage(requests=WAITING), Stage(requests=WAITING)
        peers = [Peers(place, 2, tmp_path, life=place) for place in range(2)]
        both = [QueueSharing(stage.limit, own) for stage, own in zip((here, there), peers, strict=True)]
        for own, sharing in zip(peers, both, strict=True):
            own.open()
            sharing.start()
        sent = [number for _ in range(WAITING) for number in there.send(tenant="flood")]
        here.load(waiting=WAITING)  # the engine says that they wait, and not whose they are
        async with asyncio.timeout(60):
            while has_room(here, "flood"):
                await asyncio.sleep(0.001)
            assert has_room(here, "light")
            there.limit.leave_queue(sent)
            while not has_room(here, "flood"):
                await asyncio.sleep(0.001)
        for own, sharing in zip(peers, both, strict=True):
            sharing.close()
            own.close()

    asyncio.run(body())


def test_a_process_alone_tells_nobody() -> None:
    async def body() -> None:
        sharing = QueueSharing(Stage().limit, Peers())
        before = len(asyncio.all_tasks())
        sharing.start()
        assert len(asyncio.all_tasks()) == before
        sharing.close()

    asyncio.run(body())
